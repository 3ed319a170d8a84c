{{/* Whether workers ask for RDMA: by the transport, or by the name of a resource or a device claim of theirs. */}}
{{- define "baton.rdma" -}}
{{- $asked := eq "nixl" (dig "kv" "transport" "" .Values.config) -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pods := include "baton.pods" (list $ $role) | fromYaml -}}
{{- range $name := concat (keys (default dict $pods.resources.limits)) (keys (default dict $pods.resourceClaims)) -}}
{{- if regexMatch "rdma|roce|infiniband" $name }}{{ $asked = true }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $asked -}}
{{- end -}}

{{/* Whether processes are told that KV is to go by RDMA (`kv.rdma`): what `config` says, or where it says nothing, as above. */}}
{{- define "baton.kvByRdma" -}}
{{- $kv := default dict .Values.config.kv -}}
{{- if hasKey $kv "rdma" -}}{{- $kv.rdma -}}
{{- else -}}{{- and (eq (include "baton.rdma" .) "true") (has (dig "transport" "auto" $kv) (list "auto" "nixl")) -}}{{- end -}}
{{- end -}}

{{/* Ports that UCX listens on, FIRST-LAST, where workers ask for RDMA; empty elsewhere. */}}
{{- define "baton.ucxPorts" -}}
{{- if eq (include "baton.rdma" .) "true" }}{{ dig "kv" "ucx_port_range" "" .Values.config | default "8475-8490" }}{{ end -}}
{{- end -}}

{{/* Fails if an upgrade would change what makes KV: workers of before and after could not read each other's. */}}
{{- define "baton.sameModel" -}}
{{- $there := dig "data" "config.yaml" "" (default dict (lookup "v1" "ConfigMap" .Release.Namespace (include "baton.name" (list . "decode")))) -}}
{{- if and .Release.IsUpgrade $there -}}
{{- $before := fromYaml $there -}}
{{- $now := mergeOverwrite (deepCopy .Values.config) (dict "model" (dict "path" (include "baton.modelPath" .))) -}}
{{- with include "baton.engine" . | fromYaml }}{{ $_ := set $now "engine" . }}{{ end -}}
{{- $dtype := eq (dig "engine" "device" "cpu" $now) "cuda" | ternary "auto" "float32" -}}
{{- $defaults := dict "model.path" "" "model.dtype" $dtype "engine.block_size" 16 "engine.weight_dtype" "auto" "engine.kv_dtype" "auto" "engine.kind" "baton" -}}
{{- $keys := list "engine.kind" "engine.block_size" "engine.weight_dtype" "engine.kv_dtype" "model.dtype" "model.path" -}}
{{- if include "baton.vllm" . -}}
{{- /* All are part of the fingerprint of a worker with vLLM. */}}
{{- $_ := set (set (set $defaults "engine.device" "cpu") "engine.vllm" dict) "engine.batch_invariant" false -}}
{{- $keys = concat $keys (list "engine.device" "engine.vllm" "engine.batch_invariant") -}}
{{- end -}}
{{- range $key := $keys -}}
{{- $section := index (splitList "." $key) 0 -}}
{{- $name := index (splitList "." $key) 1 -}}
{{- $default := index $defaults $key -}}
{{- $old := dig $section $name $default $before -}}
{{- $new := dig $section $name $default $now -}}
{{- $old = kindIs "map" $old | ternary (toJson $old) (toString $old) -}}
{{- $new = kindIs "map" $new | ternary (toJson $new) (toString $new) -}}
{{- if ne $old $new -}}
{{- fail (printf "%s changes from %s to %s: workers of before and after could not read each other's KV. Install a second release with it, move the clients there, and uninstall this one (docs/kubernetes.md, Another model)" $key $old $new) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails for a key of `config` that has its place in Kubernetes, and names that place. */}}
{{- define "baton.refuse" -}}
{{- $places := dict
  "cluster.name" "namespace and release make it"
  "cluster.key" "it belongs into the Secret: secrets.existingSecret"
  "cluster.host" "set listen, beside config"
  "cluster.advertise" "a pod tells its own address"
  "model.path" "set model.path, beside config"
  "kv.port" "the chart chooses ports"
  "router.replicas" "set router.replicas, beside config"
  "router.port" "set service.grpcPort" "router.http_port" "set service.httpPort" "router.page_port" "set service.pagePort"
  "router.admin_port" "the chart chooses ports"
  "prefill.replicas" "set prefill.replicas, beside config" "decode.replicas" "set decode.replicas, beside config"
  "prefill.port" "the chart chooses ports" "decode.port" "the chart chooses ports"
  "planner.enabled" "set planner.enabled, beside config" "planner.profile" "set planner.times, beside config"
  "planner.release" "it is this release"
  "telemetry.metrics_port" "the chart chooses ports" "telemetry.worker_metrics_port" "the chart chooses ports"
  "telemetry.health_port" "the chart chooses ports"
  "redis.url" "it belongs into the Secret: secrets.existingSecret"
  "security.tls_cert" "set security.tlsSecret, beside config" "security.tls_key" "set security.tlsSecret, beside config"
  "security.tls_ca" "set security.tlsSecret, beside config" "security.api_keys" "set security.apiKeysSecret, beside config"
-}}
{{- range $role := list "prefill" "decode" -}}
{{- range $key := list "cpus" "gpus" -}}{{ $_ := set $places (printf "%s.%s" $role $key) (printf "set %s.resources%s, beside config" $role (ternary " or gpu" "" (eq $key "gpus"))) }}{{- end -}}
{{- $_ := set $places (printf "%s.cores" $role) "the kubelet pins cores (CPU manager policy static)" -}}
{{- $_ := set $places (printf "%s.placement" $role) (printf "set %s.affinity, beside config" $role) -}}
{{- end -}}
{{- if and (eq (include "baton.rdma" .) "true") (include "baton.tlsSecret" .) -}}
{{- fail "RDMA and security.tlsSecret or certManager: NIXL encrypts nothing, so with certificates KV between nodes goes by TCP, inside TLS. Leave out the adapters or the certificates" -}}
{{- end -}}
{{- include "baton.gpuCheck" . -}}
{{- include "baton.sameModel" . -}}
{{- range $section, $keys := .Values.config -}}
{{- range $key, $_ := $keys -}}
{{- with index $places (printf "%s.%s" $section $key) -}}{{- fail (printf "config.%s.%s has its place in Kubernetes: %s" $section $key .) -}}{{- end -}}
{{- if and (eq $section "launcher") (ne $key "hang_s") -}}{{- fail (printf "config.launcher.%s has its place in Kubernetes: Kubernetes starts and restarts processes" $key) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The sections that a role reads, as one YAML tree: takes (root, role). */}}
{{- define "baton.config" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- include "baton.refuse" $root -}}
{{- $values := $root.Values -}}
{{- $sections := list "cluster" "model" "engine" "redis" "security" "telemetry" "launcher" -}}
{{- $more := dict "router" (list "router" "slo") "planner" (list "planner" "slo") -}}
{{- $sections = concat $sections (default (list "kv" $role) (index $more $role)) -}}
{{- $given := dict -}}
{{- range $section := $sections -}}{{- with index $values.config $section -}}{{- $_ := set $given $section . -}}{{- end -}}{{- end -}}
{{- with include "baton.engine" $root | fromYaml }}{{ $_ := set $given "engine" . }}{{ end -}}
{{- $security := dict -}}
{{- if include "baton.tlsSecret" $root -}}
{{- $security = dict "tls_cert" "/etc/baton/tls/tls.crt" "tls_key" "/etc/baton/tls/tls.key" "tls_ca" "/etc/baton/tls/ca.crt" -}}
{{- end -}}
{{- if $values.security.apiKeysSecret -}}{{- $_ := set $security "api_keys" "/etc/baton/keys/keys" -}}{{- end -}}
{{- /* What `config` may change. Two pods share neither memory nor pids: without RDMA, NIXL would try UCX's TCP, which the network policy
drops, for seconds with each new peer. Without certificates and keys, the network policy alone guards the operator's doors. */}}
{{- $defaults := dict "security" (ternary dict (dict "open_admin" true) (gt (len $security) 0)) -}}
{{- $own := dict
  "cluster" (dict "name" (include "baton.cluster" $root) "host" $values.listen)
  "model" (dict "path" (include "baton.modelPath" $root))
  "security" $security
  "telemetry" (dict "health_port" 8081)
  "launcher" (dict "kind" "kubernetes")
-}}
{{- if eq $role "router" -}}
{{- $_ := set $own "router" (dict "port" 8470 "http_port" 8000 "admin_port" 8471 "page_port" 8472) -}}
{{- /* Clients connect again from time to time, and so find the routers that have come meanwhile. */}}
{{- $_ := set $defaults "router" (dict "connection_age_s" 300) -}}
{{- /* It has no KV port: of this section it needs to know what to raise an alarm for. */}}
{{- if eq (include "baton.kvByRdma" $root) "true" }}{{ $_ := set $own "kv" (dict "rdma" true) }}{{ end -}}
{{- $_ := set $own.telemetry "metrics_port" 9090 -}}
{{- else if eq $role "planner" -}}
{{- $release := printf "%s/%s" $root.Release.Namespace $root.Release.Name -}}
{{- $_ := set $own "planner" (dict "enabled" true "profile" "/etc/baton/config/profile.yaml" "release" $release) -}}
{{- $_ := set $own.telemetry "worker_metrics_port" 9090 -}}
{{- else -}}
{{- $_ := set $own $role (dict "port" 8473) -}}
{{- if gt (int $values.gpu.workersPerGpu) 1 }}{{ $_ := set (index $own $role) "gpus" (divf 1 $values.gpu.workersPerGpu) }}{{ end -}}
{{- $_ := set $defaults "kv" (dict "transport" (ternary "auto" "tcp" (eq (include "baton.rdma" $root) "true"))) -}}
{{- with include "baton.ucxPorts" $root }}{{ $_ := set $defaults.kv "ucx_port_range" . }}{{ end -}}
{{- if eq (include "baton.kvByRdma" $root) "true" }}{{ $_ := set $defaults.kv "rdma" true }}{{ end -}}
{{- $_ := set $own "kv" (dict "port" 8474) -}}
{{- $_ := set $own.telemetry "worker_metrics_port" 9090 -}}
{{- end -}}
{{- toYaml (mergeOverwrite $defaults (deepCopy $given) $own) -}}
{{- end -}}
