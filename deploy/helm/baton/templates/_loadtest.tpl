{{/* The pod template of the Job that compares topologies of this release: the only pod of the release with a token of the API server. */}}
{{- define "baton.loadtestPod" -}}
{{- $test := .Values.loadtest -}}
{{- $common := .Values.common -}}
{{- $tls := include "baton.tlsSecret" . -}}
{{- $port := ternary .Values.service.httpPort .Values.service.grpcPort (eq $test.door "http") -}}
{{- $door := printf "%s.%s.svc.%s:%v" (include "baton.fullname" .) .Release.Namespace .Values.clusterDomain $port -}}
{{- $command := list "baton" "loadtest" "compare" "--kubernetes" (printf "%s/%s" .Release.Namespace .Release.Name) "--address" $door "--door" $test.door "--out" "/report" -}}
{{- if $tls -}}
{{- $command = concat $command (list "--ca" "/etc/baton/tls/ca.crt" "--cert" "/etc/baton/tls/tls.crt" "--key" "/etc/baton/tls/tls.key" "--server-name" (include "baton.serverName" .)) -}}
{{- end -}}
metadata:
  labels:
    {{- include "baton.selector" (list . "loadtest") | nindent 4 }}
    {{- with $common.labels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    # What is interrupted has to be done again.
    cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
    karpenter.sh/do-not-disrupt: "true"
    {{- with $common.annotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ include "baton.name" (list . "loadtest") }}
  automountServiceAccountToken: true
  enableServiceLinks: false
  # Before it ends, it gives the pools the sizes that it found: workers drain, and others start.
  terminationGracePeriodSeconds: {{ add 60 (include "baton.setting" (list . "decode" "drain_s" 30)) (include "baton.setting" (list . "prefill" "drain_s" 30)) }}
  {{- include "baton.pullSecrets" . | nindent 2 }}
  {{- include "baton.nodes" $common | nindent 2 }}
  dnsConfig:
    options:
      - {name: ndots, value: "1"}
  securityContext: {{- include "baton.user" $common | nindent 4 }}
  containers:
    - name: loadtest
      image: {{ include "baton.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - python
        - -c
        - {{ .Files.Get "files/loadtest.py" | toJson }}
        - {{ ternary "0" (int $test.keepSeconds | toString) (ne $test.claim "") | quote }}
        {{- range concat $command $test.args }}
        - {{ . | toString | quote }}
        {{- end }}
      securityContext: {{- include "baton.confined" . | nindent 8 }}
      {{- $env := dict "BATON_STATE_DIR" "/report/state" "POD" (dict "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.name"))) "NAMESPACE" .Release.Namespace }}
      {{- include "baton.env" (mergeOverwrite $env (deepCopy $common.env)) | nindent 6 }}
      resources: {{- toYaml $test.resources | nindent 8 }}
      volumeMounts:
        - {name: home, mountPath: /var/cache/baton}
        - {name: tmp, mountPath: /tmp}
        - {name: report, mountPath: /report}
        {{- if $tls }}
        - {name: tls, mountPath: /etc/baton/tls, readOnly: true}
        {{- end }}
        {{- if .Values.security.apiKeysSecret }}
        - {name: keys, mountPath: /etc/baton/keys, readOnly: true}
        {{- end }}
  volumes:
    - {name: home, emptyDir: {sizeLimit: 1Gi}}
    - {name: tmp, emptyDir: {sizeLimit: 1Gi}}
    {{- if $test.claim }}
    - {name: report, persistentVolumeClaim: {claimName: {{ $test.claim }}}}
    {{- else }}
    - {name: report, emptyDir: {sizeLimit: 4Gi}}
    {{- end }}
    {{- with $tls }}
    - {name: tls, secret: {secretName: {{ . }}}}
    {{- end }}
    {{- with .Values.security.apiKeysSecret }}
    - {name: keys, secret: {secretName: {{ . }}, optional: true, items: [{key: test-key, path: test-key}]}}
    {{- end }}
{{- end -}}
