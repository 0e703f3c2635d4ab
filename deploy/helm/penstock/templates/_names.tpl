{{/* Names and labels. */}}

{{- define "penstock.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* What all objects of a release are called; short enough for what is put behind it. */}}
{{- define "penstock.fullname" -}}
{{- $name := include "penstock.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* Labels that every object of the release is selected by. */}}
{{- define "penstock.releaseLabels" -}}
app.kubernetes.io/name: {{ include "penstock.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Labels of objects that are not pods. */}}
{{- define "penstock.labels" -}}
{{ include "penstock.releaseLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Labels that the pods of a component are selected by; of (root, kind, group). */}}
{{- define "penstock.selector" -}}
{{ include "penstock.releaseLabels" .root }}
app.kubernetes.io/component: {{ .kind }}
{{- with .group }}
penstock/worker-group: {{ . }}
{{- end }}
{{- end }}

{{/* The full reference of an image; of (root, image, tag). */}}
{{- define "penstock.image" -}}
{{- $name := .image.repository -}}
{{- if .root.Values.imageRegistry -}}
{{- $name = printf "%s/%s" (trimSuffix "/" .root.Values.imageRegistry) $name -}}
{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (.image.tag | default .tag) -}}
{{- end -}}
{{- end }}

{{/* A number or text as an argument has it: never 2e+07. */}}
{{- define "penstock.text" -}}
{{- if kindIs "slice" . -}}{{ join "," . }}
{{- else if kindIs "float64" . -}}{{ if eq . (floor .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- else -}}{{ . }}{{- end -}}
{{- end }}
