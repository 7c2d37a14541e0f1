{{/* Name of all objects of a release. */}}
{{- define "cachecraft.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the servers; they never change. */}}
{{- define "cachecraft.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of every object. */}}
{{- define "cachecraft.labels" -}}
{{ include "cachecraft.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* A variable from a secret: (list NAME SECRET), where SECRET has a name and a key; nothing without a name. */}}
{{- define "cachecraft.secretVariable" -}}
{{- $secret := index . 1 -}}
{{- if $secret.name -}}
- name: {{ index . 0 }}
  valueFrom:
    secretKeyRef: {name: {{ $secret.name | quote }}, key: {{ $secret.key | quote }}}
{{- end -}}
{{- end -}}
