{{/* `true` where workers run vLLM; empty elsewhere. */}}
{{- define "baton.vllm" -}}
{{- if eq "vllm" (toString .Values.engine) }}true{{ end -}}
{{- end -}}

{{/* What the tag of the image ends with: its variant and its engine. */}}
{{- define "baton.variant" -}}
{{- if include "baton.cuda" . }}-cuda{{ end }}{{ if include "baton.vllm" . }}-vllm{{ end -}}
{{- end -}}

{{/* The section `engine` of the configuration. Fails if it and the engine do not agree. */}}
{{- define "baton.engine" -}}
{{- $engine := deepCopy (dig "engine" dict .Values.config) -}}
{{- $kind := ternary "vllm" "baton" (eq "true" (include "baton.vllm" .)) -}}
{{- if ne $kind (dig "kind" $kind $engine) -}}
{{- fail (printf "config.engine.kind is %s, and engine is %s: set engine, beside config" $engine.kind $kind) -}}
{{- end -}}
{{- if eq $kind "vllm" -}}
{{- $_ := set $engine "kind" "vllm" -}}
{{- if eq "cpu" (dig "device" "cpu" $engine) -}}
{{- $_ := set $engine "block_size" (dig "block_size" 32 $engine) -}}
{{- if mod (int $engine.block_size) 32 -}}
{{- fail (printf "config.engine.block_size is %v: on a CPU, vLLM needs a multiple of 32" $engine.block_size) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $engine -}}
{{- end -}}

{{/* Processes of vLLM that compute, in each worker. */}}
{{- define "baton.ranks" -}}
{{- $given := dig "engine" "vllm" dict .Values.config -}}
{{- mul (int (dig "tensor_parallel_size" 1 $given)) (int (dig "pipeline_parallel_size" 1 $given)) -}}
{{- end -}}

{{/* Seconds that a worker may take to start: takes (root, role). */}}
{{- define "baton.startSeconds" -}}
{{- $long := or (include "baton.vllm" (index . 0)) (include "baton.cuda" (index . 0)) -}}
{{- default (ternary 1800 600 (ne "" $long)) (index (index . 0).Values (index . 1)).startSeconds -}}
{{- end -}}

{{/* Adds to what is said for pods of workers what vLLM needs there; what is said for them wins: takes (root, pods). */}}
{{- define "baton.withVllm" -}}
{{- $root := index . 0 -}}
{{- $pods := deepCopy (index . 1) -}}
{{- range $key := list "volumes" "volumeMounts" "env" }}{{ $_ := set $pods $key (default dict (index $pods $key)) }}{{ end -}}
{{- $ranks := int (include "baton.ranks" $root) -}}
{{- $gpu := eq "true" (include "baton.cuda" $root) -}}
{{- /* Ranks and NCCL talk through /dev/shm, of which a container has 64 MiB. */}}
{{- $shm := mul 1024 $ranks -}}
{{- $mounted := false -}}
{{- range $pods.volumeMounts }}{{ if eq "/dev/shm" (toString .mountPath) }}{{ $mounted = true }}{{ end }}{{ end -}}
{{- if not $mounted -}}
{{- $_ := set $pods.volumeMounts "vllm-shm" (dict "mountPath" "/dev/shm") -}}
{{- if not (hasKey $pods.volumes "vllm-shm") }}{{ $_ := set $pods.volumes "vllm-shm" (dict "emptyDir" (dict "medium" "Memory" "sizeLimit" (printf "%dMi" $shm))) }}{{ end -}}
{{- end -}}
{{- /* Compiled code. A volume of this name that outlives the pod spares the next one the time. */}}
{{- if not (hasKey $pods.volumes "vllm-cache") }}{{ $_ := set $pods.volumes "vllm-cache" (dict "emptyDir" (dict "sizeLimit" "8Gi")) }}{{ end -}}
{{- if not (hasKey $pods.volumeMounts "vllm-cache") }}{{ $_ := set $pods.volumeMounts "vllm-cache" (dict "mountPath" "/var/cache/vllm") }}{{ end -}}
{{- $folder := (index $pods.volumeMounts "vllm-cache").mountPath -}}
{{- $env := dict "VLLM_CACHE_ROOT" (printf "%s/vllm" $folder) "TORCHINDUCTOR_CACHE_DIR" (printf "%s/inductor" $folder) "TRITON_CACHE_DIR" (printf "%s/triton" $folder) -}}
{{- range $name, $value := $env }}{{ if not (hasKey $pods.env $name) }}{{ $_ := set $pods.env $name $value }}{{ end }}{{ end -}}
{{- /* The staging pool is memory of the pod, and so is a KV cache without a GPU: less than these need is raised. */}}
{{- $engine := dig "engine" dict $root.Values.config -}}
{{- $need := add (mul $ranks (ternary 4096 2048 $gpu)) (dig "staging_mib" 0 $engine) -}}
{{- if not $gpu }}{{ $need = add $need (mul $ranks (dig "kv_memory_mib" 0 $engine)) }}{{ end -}}
{{- range $key, $least := dict "requests" $need "limits" (add $need $shm) -}}
{{- $memory := (default dict (index $pods.resources $key)).memory | default "" | toString -}}
{{- if and $memory (lt (float64 (include "baton.mib" $memory)) (float64 $least)) -}}
{{- $_ := set (index $pods.resources $key) "memory" (printf "%dMi" $least) -}}
{{- end -}}
{{- end -}}
{{- toYaml $pods -}}
{{- end -}}

{{/* A quantity of memory in MiB. One that is written in a rare way counts as enough. */}}
{{- define "baton.mib" -}}
{{- $number := regexFind "^[0-9.]+" . -}}
{{- $units := dict "" 9.5367431640625e-7 "Ki" 0.0009765625 "Mi" 1.0 "Gi" 1024.0 "Ti" 1048576.0 "k" 0.00095367431640625 "M" 0.95367431640625 "G" 953.67431640625 "T" 953674.31640625 -}}
{{- $unit := trimPrefix $number . -}}
{{- if and $number (hasKey $units $unit) }}{{ mulf (float64 $number) (index $units $unit) }}{{ else }}{{ 1e15 }}{{ end -}}
{{- end -}}
