{{/* Several pools behind the gateways of one release; of the root. */}}

{{/* The file that gateways read, a line for each pool. No secret is in it. */}}
{{- define "penstock.poolsFile" -}}
{{- range $pool := .Values.pools }}
{{- $entry := dict "name" .name -}}
{{- if .url -}}
{{- $entry = merge $entry (dict "redis_url" .url "pool" (.pool | default "penstock") "num_shards" (int (.numShards | default 4))) -}}
{{- if .passwordSecret -}}
{{- $_ := set $entry "redis_password_file" (printf "/etc/penstock/%s/password" (include "penstock.poolSecretName" .name)) -}}
{{- end -}}
{{- else -}}
{{- $_ := set $entry "pool" $.Values.pool -}}
{{- end -}}
{{- with .models | default (ternary (list) $.Values.model.servedNames (hasKey $pool "url")) -}}
{{- $_ := set $entry "models" . -}}
{{- end }}
{{ toJson $entry }}
{{- end }}
{{- end }}

{{/* A volume's name; of a pool's. */}}
{{- define "penstock.poolSecretName" -}}
pool-{{ . | lower | replace "." "-" | replace "_" "-" | trunc 40 | trimSuffix "-" }}-password
{{- end }}

{{/* Passwords of other pools' servers, as `penstock.secrets` has them. */}}
{{- define "penstock.poolSecrets" -}}
{{- range $pool := .Values.pools }}
{{- with .passwordSecret }}
- {name: {{ include "penstock.poolSecretName" $pool.name }}, secret: {{ .name | quote }}, key: {{ .key | quote }}, path: password}
{{- end }}
{{- end }}
{{- end }}

{{/* Egress of gateways to other pools' servers. */}}
{{- define "penstock.poolsEgress" -}}
{{- range .Values.pools }}
{{- if .url }}
- to:
    {{- if .peers }}
    {{- toYaml .peers | nindent 4 }}
    {{- else }}
    {{- include "penstock.anywhere" $ | nindent 4 }}
    {{- end }}
  ports:
    {{- range .ports | default (list 6379 26379) }}
    - port: {{ int . }}
    {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* What gateways call the release's own pool in their metrics. */}}
{{- define "penstock.ownPool" -}}
{{- range .Values.pools -}}
{{- if not .url -}}{{ .name }}{{- end -}}
{{- end -}}
{{- end }}
