{{/* The Redis or Valkey server: where it is and how to get in; of the root. */}}

{{/* Addresses HOST:PORT of the StatefulSet `what` of (root, what, replicas, port), separated by blanks. */}}
{{- define "penstock.addresses" -}}
{{- $base := printf "%s-%s" (include "penstock.fullname" .root) .what -}}
{{- $found := list -}}
{{- range $ordinal := until (int .replicas) -}}
{{- $found = append $found (printf "%s-%d.%s.%s.svc.%s:%d" $base $ordinal $base $.root.Release.Namespace $.root.Values.clusterDomain (int $.port)) -}}
{{- end -}}
{{- join " " $found -}}
{{- end }}

{{- define "penstock.valkeyAddresses" -}}
{{- include "penstock.addresses" (dict "root" . "what" "valkey" "replicas" .Values.valkey.replicas "port" 6379) -}}
{{- end }}

{{/* Nothing, where there is one server. */}}
{{- define "penstock.sentinelAddresses" -}}
{{- if gt (int .Values.valkey.replicas) 1 -}}
{{- include "penstock.addresses" (dict "root" . "what" "sentinel" "replicas" 3 "port" 26379) -}}
{{- end -}}
{{- end }}

{{/* The Secret with the certificates of the server, (existingSecret, caKey, certKey, keyKey); of the root. */}}
{{- define "penstock.redisTls" -}}
{{- if not .Values.valkey.enabled -}}
{{- toJson .Values.redis.tls -}}
{{- else if .Values.valkey.tls.enabled -}}
{{- $shown := .Values.valkey.tls.clientCertificates -}}
{{- dict "existingSecret" .Values.valkey.tls.existingSecret "caKey" "ca.crt" "certKey" (ternary "tls.crt" "" $shown) "keyKey" (ternary "tls.key" "" $shown) | toJson -}}
{{- else -}}
{}
{{- end -}}
{{- end }}

{{- define "penstock.redisUrl" -}}
{{- $url := .Values.redis.url -}}
{{- if .Values.valkey.enabled -}}
{{- $user := ternary "penstock@" "" .Values.valkey.auth.enabled -}}
{{- $tls := ternary "s" "" .Values.valkey.tls.enabled -}}
{{- $sentinels := include "penstock.sentinelAddresses" . -}}
{{- if $sentinels -}}
{{- $url = printf "sentinel%s://%s%s/penstock" $tls $user (replace " " "," $sentinels) -}}
{{- else -}}
{{- $url = printf "redis%s://%s%s/0" $tls $user (include "penstock.valkeyAddresses" .) -}}
{{- end -}}
{{- end -}}
{{- $tls := fromJson (include "penstock.redisTls" .) -}}
{{- $parameters := list -}}
{{- if $tls.existingSecret -}}
{{- range $parameter, $key := dict "ssl_ca_certs" $tls.caKey "ssl_certfile" $tls.certKey "ssl_keyfile" $tls.keyKey -}}
{{- if $key -}}
{{- $parameters = append $parameters (printf "%s=/etc/penstock/redis-tls/%s" $parameter $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $url -}}
{{- if $parameters -}}
{{- ternary "&" "?" (contains "?" $url) -}}{{- join "&" $parameters -}}
{{- end -}}
{{- end }}

{{/* The Secret of the password; nothing, where none is asked for. */}}
{{- define "penstock.redisPasswordSecret" -}}
{{- if .Values.valkey.enabled -}}
{{- if .Values.valkey.auth.enabled -}}
{{- include "penstock.valkeySecret" . -}}
{{- end -}}
{{- else -}}
{{- .Values.redis.passwordSecret.name -}}
{{- end -}}
{{- end }}

{{- define "penstock.valkeySecret" -}}
{{- .Values.valkey.auth.existingSecret | default (printf "%s-valkey" (include "penstock.fullname" .)) -}}
{{- end }}

{{/* A password may be in the URL of a Secret, so the URL is a variable, not an argument. */}}
{{- define "penstock.redisVariable" -}}
- name: PENSTOCK_REDIS_URL
{{- if and (not .Values.valkey.enabled) .Values.redis.urlSecret.name }}
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.urlSecret.name }}
      key: {{ .Values.redis.urlSecret.key }}
{{- else }}
  value: {{ include "penstock.redisUrl" . | quote }}
{{- end }}
{{- end }}
