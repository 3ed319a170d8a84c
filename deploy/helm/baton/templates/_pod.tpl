{{/* What is said for all pods, for a role's profile and for the role itself, merged; of its resources, rollout and disruption, the profile's or
else the role's: takes (root, role). */}}
{{- define "baton.pods" -}}
{{- $values := (index . 0).Values -}}
{{- $role := index $values (index . 1) -}}
{{- $profile := dict -}}
{{- with $role.profile -}}
{{- if not (hasKey $values.profiles .) -}}{{- fail (printf "%s.profile %s is not among profiles" (index $ 1) .) -}}{{- end -}}
{{- $profile = index $values.profiles . -}}
{{- end -}}
{{- $made := deepCopy $values.common -}}
{{- $tolerations := $values.common.tolerations -}}
{{- range $layer := list $profile $role -}}
{{- range $key, $value := $layer -}}
{{- if eq $key "tolerations" -}}{{- $tolerations = concat $tolerations $value -}}
{{- else if and (hasKey $values.common $key) (kindIs "map" $value) -}}{{- $_ := set $made $key (mergeOverwrite (index $made $key) (deepCopy $value)) -}}
{{- else if hasKey $values.common $key -}}{{- $_ := set $made $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $_ := set $made "tolerations" $tolerations -}}
{{- range $key := list "resources" "rollout" "disruption" -}}{{- $_ := set $made $key (default (index $role $key) (index $profile $key)) -}}{{- end -}}
{{- $root := index . 0 -}}
{{- if has (index . 1) (list "prefill" "decode") -}}
{{- $ahead := or (not (include "baton.cuda" $root)) (and (eq "values" $role.scaling) (le (int $role.replicas) 1)) -}}
{{- $_ := set $made "rollout" (mergeOverwrite (dict "maxSurge" (ternary 1 0 $ahead) "maxUnavailable" (ternary 0 1 $ahead)) $made.rollout) -}}
{{- if include "baton.cuda" $root }}{{ $made = include "baton.withGpus" (list $root $made) | fromYaml }}{{ end -}}
{{- if include "baton.vllm" $root }}{{ $made = include "baton.withVllm" (list $root $made) | fromYaml }}{{ end -}}
{{- end -}}
{{- toYaml $made -}}
{{- end -}}

{{/* Secrets with which images are pulled, as a part of a pod's spec. */}}
{{- define "baton.pullSecrets" -}}
{{- with concat .Values.image.pullSecrets .Values.global.imagePullSecrets | uniq -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* Where a pod may run: takes what is said for pods. One whose node is gone goes after 30 s. */}}
{{- define "baton.nodes" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
tolerations:
  {{- range $key := list "not-ready" "unreachable" }}
  - {key: node.kubernetes.io/{{ $key }}, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
  {{- end }}
  {{- with .tolerations }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}

{{/* The security context of a pod: takes what is said for pods. */}}
{{- define "baton.user" -}}
runAsNonRoot: true
seccompProfile: {type: RuntimeDefault}
{{- if not .adaptSecurityContext }}
runAsUser: 10001
runAsGroup: 0
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
{{- end }}
{{- end -}}

{{/* The environment of a container: takes values, or their sources, by name. */}}
{{- define "baton.env" -}}
{{- with . -}}
env:
  {{- range $name, $value := . }}
  - name: {{ $name }}
    {{- if kindIs "map" $value }}{{ toYaml $value | nindent 4 }}{{ else }}
    value: {{ $value | quote }}
    {{- end }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* The security context of every container. */}}
{{- define "baton.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The pod template of a role: takes root, role, command, ports, grace, secret (the key that it mounts), config (whether it reads Baton's
configuration), files (more of its ConfigMap, by name), account (a service account of its own, whose token it holds; it needs no model). */}}
{{- define "baton.pod" -}}
{{- $values := .root.Values -}}
{{- $role := index $values .role -}}
{{- $pods := include "baton.pods" (list .root .role) | fromYaml -}}
{{- /* No version among the labels: a chart that changes nothing else replaces no pod. */}}
{{- /* Whoever empties a node may take a pod with these volumes: nothing in them is missed. */}}
{{- $ours := ternary "home,tmp,vllm-shm,vllm-cache" "home,tmp" (hasKey (default dict $pods.volumes) "vllm-cache") }}
{{- $annotations := dict "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes" $ours }}
{{- if .config }}
{{- $told := include "baton.config" (list .root .role) }}
{{- range $name, $text := default dict .files }}{{ $told = printf "%s%s%s" $told $name $text }}{{ end }}
{{- $hash := $told | sha256sum | trunc 16 }}
{{- $annotations = merge $annotations (dict "baton/config" $hash "prometheus.io/scrape" "true" "prometheus.io/port" "9090") }}
{{- end }}
metadata:
  labels:
    {{- include "baton.selector" (list .root .role) | nindent 4 }}
    app.kubernetes.io/part-of: baton
    {{- with $pods.labels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with mergeOverwrite $annotations $pods.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ default (include "baton.fullname" .root) .account }}
  automountServiceAccountToken: {{ ne "" (default "" .account) }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .grace }}
  {{- include "baton.pullSecrets" .root | nindent 2 }}
  {{- include "baton.nodes" $pods | nindent 2 }}
  {{- with $pods.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $pods.resourceClaims }}
  resourceClaims:
    {{- range $name, $claim := . }}
    - {{ merge (dict "name" $name) $claim | toYaml | nindent 6 | trim }}
    {{- end }}
  {{- end }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      nodeTaintsPolicy: Honor
      matchLabelKeys: [pod-template-hash]
      labelSelector:
        matchLabels: {{- include "baton.selector" (list .root .role) | nindent 10 }}
  dnsConfig:
    options:
      - {name: ndots, value: "1"}
      - {name: timeout, value: "1"}
  securityContext: {{- include "baton.user" $pods | nindent 4 }}
  {{- if and .config (not .account) }}{{ include "baton.modelInit" .root | nindent 2 }}{{ end }}
  containers:
    - name: {{ .role }}
      image: {{ include "baton.image" .root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args: {{ concat .command $pods.args | toJson }}
      securityContext: {{- include "baton.confined" . | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      {{- $env := dict }}
      {{- if .config }}
      {{- $_ := set $env "BATON_CLUSTER_ADVERTISE" (dict "valueFrom" (dict "fieldRef" (dict "fieldPath" "status.podIP"))) }}
      {{- $_ := set $env "BATON_WORKER_NAME" (dict "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.name"))) }}
      {{- end }}
      {{- include "baton.env" (mergeOverwrite $env $pods.env) | nindent 6 }}
      ports:
        {{- range $name, $port := .ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
      {{- if .config }}
      # Not there, not ready, dead: three questions. None asks about another process.
      startupProbe:
        httpGet: {path: /startupz, port: health}
        periodSeconds: 2
        timeoutSeconds: 5
        failureThreshold: {{ div (include "baton.startSeconds" (list .root .role)) 2 }}
      readinessProbe:
        httpGet: {path: /readyz, port: health}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 2
      livenessProbe:
        httpGet: {path: /livez, port: health}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      {{- else }}
      readinessProbe:
        tcpSocket: {port: {{ keys .ports | first }}}
        periodSeconds: 2
      livenessProbe:
        tcpSocket: {port: {{ keys .ports | first }}}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      {{- end }}
      {{- if $role.preStopSeconds }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ $role.preStopSeconds }}}
      {{- end }}
      {{- $resources := $pods.resources }}
      {{- if and $pods.resourceClaims (not (hasKey $resources "claims")) }}
      {{- $claims := list }}
      {{- range $name, $_ := $pods.resourceClaims }}{{ $claims = append $claims (dict "name" $name) }}{{ end }}
      {{- $resources = merge (dict "claims" $claims) $resources }}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: home, mountPath: /var/cache/baton}
        - {name: tmp, mountPath: /tmp}
        - {name: secret, mountPath: /etc/baton/secret, readOnly: true}
        {{- if .config }}
        - {name: config, mountPath: /etc/baton/config, readOnly: true}
        {{- if not .account }}{{ include "baton.modelMount" .root | nindent 8 }}{{ end }}
        {{- with include "baton.tlsSecret" .root }}
        - {name: tls, mountPath: /etc/baton/tls, readOnly: true}
        {{- end }}
        {{- with $values.security.apiKeysSecret }}
        - {name: keys, mountPath: /etc/baton/keys, readOnly: true}
        {{- end }}
        {{- end }}
        {{- range $name, $mount := $pods.volumeMounts }}
        - {{ merge (dict "name" $name) $mount | toYaml | nindent 10 | trim }}
        {{- end }}
  volumes:
    - {name: home, emptyDir: {sizeLimit: 1Gi}}
    - {name: tmp, emptyDir: {sizeLimit: 1Gi}}
    - name: secret
      secret:
        secretName: {{ include "baton.secret" .root }}
        items: [{key: {{ .secret }}, path: {{ .secret }}}]
    {{- if .config }}
    - {name: config, configMap: {name: {{ include "baton.name" (list .root .role) }}}}
    {{- if not .account }}{{ include "baton.modelVolume" .root | nindent 4 }}{{ end }}
    {{- with include "baton.tlsSecret" .root }}
    - {name: tls, secret: {secretName: {{ . }}}}
    {{- end }}
    {{- with $values.security.apiKeysSecret }}
    - {name: keys, secret: {secretName: {{ . }}, items: [{key: keys, path: keys}]}}
    {{- end }}
    {{- end }}
    {{- range $name, $volume := $pods.volumes }}
    - {{ merge (dict "name" $name) $volume | toYaml | nindent 6 | trim }}
    {{- end }}
{{- end -}}

{{/* The Deployment, ConfigMap and PodDisruptionBudget of a role that reads Baton's configuration: takes root, role, module, ports, drain,
files, account. */}}
{{- define "baton.workload" -}}
{{- $name := include "baton.name" (list .root .role) -}}
{{- $role := index .root.Values .role -}}
{{- $pods := include "baton.pods" (list .root .role) | fromYaml -}}
{{- if eq "lws" (default "" $role.workload) }}{{ fail (printf "%s.workload lws is reserved for ranks on several nodes, which this chart cannot run yet" .role) }}{{ end -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $name }}
  labels: {{- include "baton.labels" (list .root .role) | nindent 4 }}
data:
  config.yaml: |
    {{- include "baton.config" (list .root .role) | nindent 4 }}
  {{- range $name, $text := default dict .files }}
  {{ $name }}: |
    {{- $text | nindent 4 }}
  {{- end }}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels: {{- include "baton.labels" (list .root .role) | nindent 4 }}
  annotations: {baton/scaling: {{ default "values" $role.scaling }}}
spec:
  {{- if eq (default "values" $role.scaling) "values" }}
  replicas: {{ $role.replicas }}
  {{- end }}
  revisionHistoryLimit: 5
  progressDeadlineSeconds: {{ add (include "baton.startSeconds" (list .root .role)) 120 (include "baton.modelWait" .root) }}
  strategy:
    type: RollingUpdate
    rollingUpdate: {{- toYaml $pods.rollout | nindent 6 }}
  selector:
    matchLabels: {{- include "baton.selector" (list .root .role) | nindent 6 }}
  template:
    {{- $command := list "python" "-m" .module "--config" "/etc/baton/config/config.yaml" "--config" "/etc/baton/secret/config.yaml" }}
    {{- $pod := dict "root" .root "role" .role "command" $command "ports" .ports "config" true "secret" "config.yaml" }}
    {{- $pod = merge $pod (dict "files" .files "account" .account) }}
    {{- $grace := add $role.preStopSeconds .drain 10 }}
    {{- include "baton.pod" (set $pod "grace" $grace) | nindent 4 }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  labels: {{- include "baton.labels" (list .root .role) | nindent 4 }}
spec:
  {{- toYaml $pods.disruption | nindent 2 }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "baton.selector" (list .root .role) | nindent 6 }}
{{- end -}}

{{/* A number of the configuration, or its default: takes (root, section, key, default). */}}
{{- define "baton.setting" -}}
{{- int (ceil (dig (index . 1) (index . 2) (index . 3) (index . 0).Values.config)) -}}
{{- end -}}
