{{/* The pod template of the Job that fetches the model: the only pod of the release that reaches outside. */}}
{{- define "baton.fetchPod" -}}
{{- $fetch := .Values.model.fetch -}}
{{- $common := .Values.common -}}
{{- if and $fetch.caSecret $fetch.caConfigMap -}}{{- fail "model.fetch.caSecret and model.fetch.caConfigMap: set one" -}}{{- end -}}
{{- $more := list "--stall-s" (int $fetch.stallSeconds | toString) -}}
{{- if or $fetch.caSecret $fetch.caConfigMap -}}{{- $more = concat $more (list "--ca" "/etc/baton/ca/ca.crt") -}}{{- end -}}
{{- if $fetch.existingSecret -}}{{- $more = concat $more (list "--secrets" "/etc/baton/fetch") -}}{{- end -}}
{{- if $fetch.unverified -}}{{- $more = append $more "--unverified" -}}{{- end -}}
metadata:
  labels:
    {{- include "baton.selector" (list . "fetch") | nindent 4 }}
    {{- with $common.labels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    # It may take hours: no autoscaler empties its node meanwhile.
    cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
    karpenter.sh/do-not-disrupt: "true"
    {{- with $common.annotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ include "baton.fullname" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- include "baton.pullSecrets" . | nindent 2 }}
  {{- include "baton.nodes" $common | nindent 2 }}
  securityContext: {{- include "baton.user" $common | nindent 4 }}
  containers:
    - name: fetch
      image: {{ include "baton.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: {{ concat (include "baton.fetchCommand" . | fromJsonArray) $more | toJson }}
      securityContext: {{- include "baton.confined" . | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      {{- $env := dict }}
      {{- if $fetch.existingSecret }}
      {{- $_ := set $env "AWS_SHARED_CREDENTIALS_FILE" "/etc/baton/fetch/credentials" }}
      {{- end }}
      {{- include "baton.env" (mergeOverwrite $env (deepCopy $common.env) (deepCopy $fetch.env)) | nindent 6 }}
      resources: {{- toYaml $fetch.resources | nindent 8 }}
      volumeMounts:
        - {name: home, mountPath: /var/cache/baton}
        - {name: tmp, mountPath: /tmp}
        - {name: model, mountPath: {{ .Values.model.mountPath }}}
        {{- if $fetch.existingSecret }}
        - {name: secret, mountPath: /etc/baton/fetch, readOnly: true}
        {{- end }}
        {{- if or $fetch.caSecret $fetch.caConfigMap }}
        - {name: ca, mountPath: /etc/baton/ca, readOnly: true}
        {{- end }}
  volumes:
    - {name: home, emptyDir: {sizeLimit: 1Gi}}
    - {name: tmp, emptyDir: {sizeLimit: 1Gi}}
    - {name: model, persistentVolumeClaim: {claimName: {{ include "baton.modelClaim" . }}}}
    {{- with $fetch.existingSecret }}
    - {name: secret, secret: {secretName: {{ . }}}}
    {{- end }}
    {{- with $fetch.caSecret }}
    - {name: ca, secret: {secretName: {{ . }}, items: [{key: ca.crt, path: ca.crt}]}}
    {{- end }}
    {{- with $fetch.caConfigMap }}
    - {name: ca, configMap: {name: {{ . }}, items: [{key: ca.crt, path: ca.crt}]}}
    {{- end }}
{{- end -}}
