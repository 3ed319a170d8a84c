{{- define "baton.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Values.fullnameOverride | default (ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name)) -}}
{{- $full | trunc 48 | trimSuffix "-" -}}
{{- end -}}

{{/* A role's name: takes (root, role). */}}
{{- define "baton.name" -}}
{{ include "baton.fullname" (index . 0) }}-{{ index . 1 }}
{{- end -}}

{{/* What selects a role's pods; never changes: takes (root, role). */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ default (index . 0).Chart.Name (index . 0).Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of every object: takes (root, role). */}}
{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "baton.image" -}}
{{- $registry := default .Values.image.registry .Values.global.imageRegistry -}}
{{- $name := .Values.image.repository -}}
{{- if $registry }}{{ $name = printf "%s/%s" $registry $name }}{{ end -}}
{{- $own := printf "%s%s" .Chart.AppVersion (include "baton.variant" .) -}}
{{- if .Values.image.digest }}{{ $name }}@{{ .Values.image.digest }}{{ else }}{{ $name }}:{{ .Values.image.tag | default $own }}{{ end -}}
{{- end -}}

{{/* The name under which processes find each other in Redis: two releases never meet. */}}
{{- define "baton.cluster" -}}
{{- $name := printf "%s.%s" .Release.Namespace .Release.Name -}}
{{- if gt (len $name) 64 }}{{ printf "%s-%s" (trunc 55 $name) (sha256sum $name | trunc 8) }}{{ else }}{{ $name }}{{ end -}}
{{- end -}}

{{/* The Secret with certificates; empty without TLS. */}}
{{- define "baton.tlsSecret" -}}
{{- if .Values.security.certManager.issuer }}{{ include "baton.fullname" . }}-tls{{ else }}{{ .Values.security.tlsSecret }}{{ end -}}
{{- end -}}

{{/* The name under which clients ask for the model. */}}
{{- define "baton.served" -}}
{{ dig "model" "served_name" "" .Values.config | default (include "baton.modelPath" . | base) }}
{{- end -}}

{{/* Where pods ask for names, as the ports of an egress rule. */}}
{{- define "baton.names" -}}
{{- $ports := list -}}
{{- range $port := .Values.networkPolicy.dnsPorts -}}{{- range $protocol := list "UDP" "TCP" -}}
{{- $ports = append $ports (dict "port" (int $port) "protocol" $protocol) -}}
{{- end -}}{{- end -}}
{{- toJson (dict "ports" $ports) -}}
{{- end -}}

{{/* The families of a Service: both only where processes bind both. */}}
{{- define "baton.families" -}}
{{ ternary "PreferDualStack" "SingleStack" (contains ":" .Values.listen) }}
{{- end -}}

{{/* The name in the certificates. */}}
{{- define "baton.serverName" -}}
{{ dig "security" "server_name" "baton.internal" .Values.config }}
{{- end -}}

{{- define "baton.secret" -}}
{{ .Values.secrets.existingSecret | default (include "baton.fullname" .) }}
{{- end -}}
