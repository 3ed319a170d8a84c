{{/* Where the model comes from: claim, hostPath, image, or nothing for the one that ships. A fetch fills a claim. Fails for two at once. */}}
{{- define "baton.modelKind" -}}
{{- $model := .Values.model -}}
{{- $ways := dict "claim" $model.claim "hostPath" $model.hostPath "image" $model.image "fetch.source" $model.fetch.source -}}
{{- $given := list -}}
{{- range $name := list "claim" "fetch.source" "hostPath" "image" -}}{{- if index $ways $name -}}{{- $given = append $given $name -}}{{- end -}}{{- end -}}
{{- if and (gt (len $given) 1) (ne (join "," $given) "claim,fetch.source") -}}
{{- fail (printf "model.%s and model.%s: a model comes from one place (a fetch may fill a claim)" (index $given 0) (index $given 1)) -}}
{{- end -}}
{{- if has "fetch.source" $given -}}claim{{- else -}}{{- with $given -}}{{- first . -}}{{- end -}}{{- end -}}
{{- end -}}

{{/* The claim on which the model is. */}}
{{- define "baton.modelClaim" -}}
{{ .Values.model.claim | default (include "baton.name" (list . "model")) }}
{{- end -}}

{{/* The model's folder. A fetched one lies under a name of its source, so that pods of the old release keep theirs while a new one comes. */}}
{{- define "baton.modelPath" -}}
{{- $model := .Values.model -}}
{{- if $model.path -}}
{{- $model.path -}}
{{- else if $model.fetch.source -}}
{{- $wanted := list $model.fetch.source $model.fetch.endpoint (join " " $model.fetch.include) | join "\n" -}}
{{- $name := regexReplaceAll "^[a-z0-9]+://" $model.fetch.source "" | regexFind "[^/@]+/*(@.*)?$" | regexFind "^[^/@]+" -}}
{{- printf "%s/%s/%s" $model.mountPath (sha256sum $wanted | trunc 8) $name -}}
{{- else -}}
{{- ternary $model.mountPath "/models/tale" (ne (include "baton.modelKind" .) "") -}}
{{- end -}}
{{- end -}}

{{/* Seconds that a pod may wait for its model. */}}
{{- define "baton.modelWait" -}}
{{- ternary .Values.model.fetch.withinSeconds 0 (ne .Values.model.fetch.source "") -}}
{{- end -}}

{{/* The model's volume, for pods that read it. */}}
{{- define "baton.modelVolume" -}}
{{- $kind := include "baton.modelKind" . -}}
{{- if eq $kind "claim" }}
- {name: model, persistentVolumeClaim: {claimName: {{ include "baton.modelClaim" . }}, readOnly: true}}
{{- else if eq $kind "hostPath" }}
- {name: model, hostPath: {path: {{ .Values.model.hostPath }}, type: Directory}}
{{- else if eq $kind "image" }}
- {name: model, image: {reference: {{ .Values.model.image }}, pullPolicy: {{ .Values.model.imagePullPolicy }}}}
{{- end }}
{{- end -}}

{{- define "baton.modelMount" -}}
{{- if include "baton.modelKind" . }}
- {name: model, mountPath: {{ .Values.model.mountPath }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* What a pod that reads a fetched model does first: it waits, so that it does not start, fail and start again meanwhile. */}}
{{- define "baton.modelInit" -}}
{{- with .Values.model.fetch.source }}
initContainers:
  - name: model
    image: {{ include "baton.image" $ }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    args: {{ concat (include "baton.fetchCommand" $ | fromJsonArray) (list "--wait") | toJson }}
    securityContext: {{- include "baton.confined" $ | nindent 6 }}
    terminationMessagePolicy: FallbackToLogsOnError
    resources:
      requests: {cpu: 50m, memory: 128Mi}
      limits: {memory: 256Mi}
    volumeMounts:
      - {name: home, mountPath: /var/cache/baton}
      - {name: tmp, mountPath: /tmp}
      {{- include "baton.modelMount" $ | nindent 6 }}
{{- end }}
{{- end -}}

{{/* What the Job and those that wait for it agree on, as a JSON list. */}}
{{- define "baton.fetchCommand" -}}
{{- $fetch := .Values.model.fetch -}}
{{- $command := list "baton" "fetch" $fetch.source (include "baton.modelPath" .) "--within-s" (int $fetch.withinSeconds | toString) -}}
{{- with $fetch.endpoint -}}{{- $command = concat $command (list "--endpoint" .) -}}{{- end -}}
{{- range $fetch.include -}}{{- $command = concat $command (list "--include" .) -}}{{- end -}}
{{- toJson $command -}}
{{- end -}}

{{/* Fails for what this cluster, or the rest of the values, does not allow. */}}
{{- define "baton.modelCheck" -}}
{{- $model := .Values.model -}}
{{- $kind := include "baton.modelKind" . -}}
{{- if eq $kind "claim" -}}{{- include "baton.claimCheck" . -}}{{- end -}}
{{- if and $model.fetch.source $model.path (not (hasPrefix (printf "%s/" $model.mountPath) $model.path)) -}}
{{- fail (printf "model.path %s is not below model.mountPath %s, where the claim is that model.fetch fills" $model.path $model.mountPath) -}}
{{- end -}}
{{- if and (eq $kind "image") (not $model.imageForce) (semverCompare "<1.35.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "model.image needs Kubernetes 1.35 or newer, and this is %s: an older one may drop the volume without a word. Set model.imageForce if the feature gate ImageVolume is on" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if eq $kind "hostPath" -}}
{{- range $role := list "prefill" "decode" -}}
{{- $values := index $.Values $role -}}
{{- $none := and (eq (int $values.replicas) 0) (eq $values.scaling "values") -}}
{{- if and (not $none) (not $values.profile) -}}{{- fail (printf "model.hostPath needs %s.profile: only the machines of a profile are known to have the folder" $role) -}}{{- end -}}
{{- end -}}
{{- $router := include "baton.pods" (list . "router") | fromYaml -}}
{{- if not (or $router.nodeSelector $router.affinity) -}}
{{- fail "model.hostPath needs router.nodeSelector or router.affinity: a router reads the tokenizer from the folder, too" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Pods of several nodes read the claim, and a Job may write it. An unknown claim (helm template) is not checked. */}}
{{- define "baton.claimCheck" -}}
{{- $fetch := .Values.model.fetch -}}
{{- $name := include "baton.modelClaim" . -}}
{{- $modes := ternary $fetch.storage.accessModes list (eq .Values.model.claim "") -}}
{{- with .Values.model.claim -}}{{- with lookup "v1" "PersistentVolumeClaim" $.Release.Namespace . -}}{{- $modes = .spec.accessModes -}}{{- end -}}{{- end -}}
{{- $enough := ternary (list "ReadWriteMany") (list "ReadWriteMany" "ReadOnlyMany") (ne $fetch.source "") -}}
{{- $has := false -}}
{{- range $modes -}}{{- if has . $enough -}}{{- $has = true -}}{{- end -}}{{- end -}}
{{- if and $modes (not $has) -}}
{{- fail (printf "claim %s is %s, and several pods use it: it must be %s. Make a claim of a StorageClass that can (NFS, CephFS, Filestore, EFS), or use model.image or model.hostPath" $name (join ", " $modes) (join " or " $enough)) -}}
{{- end -}}
{{- end -}}
