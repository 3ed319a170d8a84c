{{/* `true` where workers compute on GPUs; empty elsewhere. */}}
{{- define "baton.cuda" -}}
{{- if eq "cuda" (dig "engine" "device" "cpu" .Values.config) }}true{{ end -}}
{{- end -}}

{{/* GPUs that each worker needs. */}}
{{- define "baton.gpusEach" -}}
{{- if include "baton.cuda" . }}{{ ternary (include "baton.ranks" .) "1" (eq "true" (include "baton.vllm" .)) }}{{ else }}0{{ end -}}
{{- end -}}

{{/* GPUs that a pod asks for: takes its resources. */}}
{{- define "baton.gpus" -}}
{{- $count := 0 -}}
{{- range $name, $value := merge (dict) (default dict .limits) (default dict .requests) -}}
{{- if regexMatch "/(gpu(\\.shared)?|mig-.+)$" $name }}{{ $count = add $count (int $value) }}{{ end -}}
{{- end -}}
{{- $count -}}
{{- end -}}

{{/* `true` if device claims may bring a pod its GPUs: takes what is said for pods. Those of RDMA adapters bring none. */}}
{{- define "baton.claimed" -}}
{{- range $name, $_ := .resourceClaims -}}
{{- if not (regexMatch "rdma|roce|infiniband" $name) }}true{{ end -}}
{{- end -}}
{{- end -}}

{{/* Adds to what is said for pods of workers what they need on GPUs; what is said for them wins: takes (root, pods). */}}
{{- define "baton.withGpus" -}}
{{- $root := index . 0 -}}
{{- $gpu := $root.Values.gpu -}}
{{- $pods := deepCopy (index . 1) -}}
{{- range $key := list "requests" "limits" }}{{ $_ := set $pods.resources $key (default dict (index $pods.resources $key)) }}{{ end -}}
{{- if not (or (int (include "baton.gpus" $pods.resources)) (include "baton.claimed" $pods) (eq $gpu.resource "")) -}}
{{- $_ := set $pods.resources.limits $gpu.resource (int (include "baton.gpusEach" $root)) -}}
{{- end -}}
{{- $_ := set $pods "runtimeClassName" (default $gpu.runtimeClassName $pods.runtimeClassName) -}}
{{- range $gpu.tolerations }}{{ if not (has . $pods.tolerations) }}{{ $_ := set $pods "tolerations" (append $pods.tolerations .) }}{{ end }}{{ end -}}
{{- if not (include "baton.vllm" $root) -}}
{{- /* A pool on the device has a pool of the host beside it. Without kv_memory_mib its size is known on the device alone. */}}
{{- $pool := int (dig "engine" "kv_memory_mib" 0 $root.Values.config) -}}
{{- $need := add 4096 $pool -}}
{{- range $key := list "requests" "limits" -}}
{{- $resources := index $pods.resources $key -}}
{{- $memory := $resources.memory | default "" | toString -}}
{{- if and $memory (lt (float64 (include "baton.mib" $memory)) (float64 $need)) -}}
{{- if or $pool (eq $key "requests") }}{{ $_ := set $resources "memory" (printf "%dMi" $need) }}{{ else }}{{ $_ := unset $resources "memory" }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $pods -}}
{{- end -}}

{{/* Fails where GPUs and the rest of the values contradict each other. What a device claim brings is not known here. */}}
{{- define "baton.gpuCheck" -}}
{{- $gpu := .Values.gpu -}}
{{- $device := dig "engine" "device" "cpu" .Values.config -}}
{{- $each := int (include "baton.gpusEach" .) -}}
{{- $shared := gt (int $gpu.workersPerGpu) 1 -}}
{{- if and $shared (not $each) -}}
{{- fail (printf "gpu.workersPerGpu is %v, and config.engine.device is %s: workers share GPUs where it is cuda" $gpu.workersPerGpu $device) -}}
{{- else if and $gpu.runtimeClassName (not $each) -}}
{{- fail (printf "gpu.runtimeClassName is %s, and config.engine.device is %s: set it to cuda" $gpu.runtimeClassName $device) -}}
{{- else if and $shared (gt $each 1) -}}
{{- fail (printf "gpu.workersPerGpu is %v, and each worker has %d ranks: a device plugin may give two of them the same GPU, which NCCL refuses" $gpu.workersPerGpu $each) -}}
{{- else if and (hasSuffix ".shared" $gpu.resource) (not $shared) -}}
{{- fail (printf "gpu.resource is %s, of which one GPU serves several pods: set gpu.workersPerGpu to how many, so that each worker takes its part of the memory" $gpu.resource) -}}
{{- else if and $each (not (regexMatch "^($|.+/(gpu(\\.shared)?|mig-.+)$)" $gpu.resource)) -}}
{{- fail (printf "gpu.resource is %s: it must be the name of a GPU (…/gpu, …/gpu.shared, …/mig-PROFILE), or empty" $gpu.resource) -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $values := index $.Values $role -}}
{{- $pods := include "baton.pods" (list $ $role) | fromYaml -}}
{{- $gpus := int (include "baton.gpus" $pods.resources) -}}
{{- $own := and $each $gpus -}}
{{- if and (eq (int $values.replicas) 0) (eq $values.scaling "values") -}}
{{- else if and (eq $device "cpu") $gpus -}}
{{- fail (printf "%s.resources or its profile ask for GPUs (%d), and config.engine.device is cpu: set it to cuda, or ask for none" $role $gpus) -}}
{{- else if and $own (ne $gpus $each) -}}
{{- $needs := ternary (printf "ranks of config.engine.vllm (tensor_parallel_size * pipeline_parallel_size): %d. These must be equal: each rank has a GPU of its own" $each) "a worker of Baton's own engine uses one" (eq "true" (include "baton.vllm" $)) -}}
{{- fail (printf "GPUs that %s.resources or its profile ask for: %d; %s" $role $gpus $needs) -}}
{{- end -}}
{{- end -}}
{{- end -}}
