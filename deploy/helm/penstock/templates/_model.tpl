{{/* The model: its arguments, its volume, its variables; of the root. */}}

{{- define "penstock.modelArguments" -}}
{{- $model := .Values.model -}}
{{- if $model.hub.id -}}
- {{ printf "--model=%s" $model.hub.id | quote }}
{{- with $model.hub.revision }}
- {{ printf "--revision=%s" . | quote }}
{{- end }}
{{- else if $model.path -}}
- {{ printf "--model=%s" $model.path | quote }}
{{- else -}}
- {{ printf "--model=%s" (clean (printf "/models/%s" (or $model.pvc.path $model.image.path))) | quote }}
{{- end -}}
{{- end }}

{{- define "penstock.modelVariables" -}}
{{- $hub := .Values.model.hub -}}
{{- if $hub.id -}}
- name: HF_HOME
  value: /models
{{- with $hub.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $hub.tokenKey }}
{{- end }}
{{- end -}}
{{- end }}

{{- define "penstock.modelVolume" -}}
{{- $model := .Values.model -}}
{{- if $model.hub.id -}}
- name: model
{{- if or $model.hub.existingClaim $model.hub.cache.create }}
  persistentVolumeClaim:
    claimName: {{ $model.hub.existingClaim | default (printf "%s-models" (include "penstock.fullname" .)) }}
{{- else }}
  emptyDir: {}
{{- end }}
{{- else if $model.pvc.claimName -}}
- name: model
  persistentVolumeClaim:
    claimName: {{ $model.pvc.claimName }}
    readOnly: true
{{- else if $model.image.reference -}}
- name: model
  image:
    reference: {{ $model.image.reference }}
    pullPolicy: {{ $model.image.pullPolicy }}
{{- end -}}
{{- end }}

{{- define "penstock.modelMount" -}}
{{- $model := .Values.model -}}
{{- if not $model.path -}}
- name: model
  mountPath: /models
  readOnly: {{ not $model.hub.id }}
{{- end -}}
{{- end }}
