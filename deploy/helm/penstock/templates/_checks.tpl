{{/* What values.schema.json cannot say; one sentence each. */}}
{{- define "penstock.checks" -}}
{{- $model := .Values.model -}}
{{- $sources := compact (list $model.hub.id $model.pvc.claimName $model.image.reference $model.path) -}}
{{- if ne (len $sources) 1 -}}
{{- fail (printf "exactly one of model.hub.id, model.pvc.claimName, model.image.reference and model.path must say where the model is, %d do" (len $sources)) -}}
{{- end -}}
{{- $least := 0 -}}
{{- range $group, $own := .Values.workers -}}
{{- $values := mergeOverwrite (deepCopy $.Values.defaults) (deepCopy $.Values.worker) (deepCopy ($own | default dict)) -}}
{{- if $values.keda.enabled -}}
{{- $least = add $least (int $values.keda.minReplicas) -}}
{{- else if $values.autoscaling.enabled -}}
{{- $least = add $least (int $values.autoscaling.minReplicas) -}}
{{- else -}}
{{- $least = add $least (int $values.replicas) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.gateway.enabled (eq (int $least) 0) (not $model.servedNames) -}}
{{- fail "model.servedNames must name the model where there may be no worker: without a worker gateways know no other name, and nothing could wait for one" -}}
{{- end -}}
{{- if .Values.valkey.enabled -}}
{{- if or .Values.redis.url .Values.redis.urlSecret.name -}}
{{- fail "redis.url names a server, but valkey.enabled makes one: set valkey.enabled to false, or leave redis.url empty" -}}
{{- end -}}
{{- if and .Values.valkey.tls.enabled (not .Values.valkey.tls.existingSecret) -}}
{{- fail "valkey.tls.enabled asks for certificates, which the chart does not make: name the Secret with tls.crt, tls.key and ca.crt in valkey.tls.existingSecret" -}}
{{- end -}}
{{- else if .Values.valkey.tls.enabled -}}
{{- fail "valkey.tls is for the chart's own server, and valkey.enabled is false: TLS of an external one is said by redis.url (rediss://) and redis.tls" -}}
{{- else if not (or .Values.redis.url .Values.redis.urlSecret.name) -}}
{{- fail "valkey.enabled is false, so redis.url or redis.urlSecret must say where the server is" -}}
{{- end -}}
{{- if not .Values.gateway.enabled -}}
{{- if or .Values.pools .Values.ingress.enabled .Values.httpRoute.enabled .Values.grpcRoute.enabled -}}
{{- fail "gateway.enabled is false, so there is nothing that pools, ingress, httpRoute and grpcRoute could be for: leave them out, or set it to true" -}}
{{- end -}}
{{- end -}}
{{- $own := 0 -}}
{{- range .Values.pools -}}
{{- if not .url -}}
{{- $own = add $own 1 -}}
{{- if or .pool .numShards .passwordSecret .peers .ports -}}
{{- fail (printf "pools: %s has no url and so is the release's own, which pool, numShards and redis or valkey describe: leave out what is said here, or give it a url" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if gt (int $own) 1 -}}
{{- fail (printf "pools: %d have no url, but the release has one pool of its own: give the others the url of their server" $own) -}}
{{- end -}}
{{- $pool := lookup "v1" "ConfigMap" .Release.Namespace (printf "%s-pool" (include "penstock.fullname" .)) -}}
{{- if $pool -}}
{{- if and (eq $pool.data.pool .Values.pool) (ne $pool.data.numShards (toString (int .Values.numShards))) -}}
{{- fail (printf "numShards of the pool %s is %s and cannot change while it lives: give the release another pool, which begins empty, or keep the number" .Values.pool $pool.data.numShards) -}}
{{- end -}}
{{- if and .Values.valkey.enabled (ne ($pool.data.valkeyTls | default "false") (toString .Values.valkey.tls.enabled)) -}}
{{- fail "valkey.tls.enabled cannot change while the release lives: servers with TLS and servers without cannot reach each other, so the upgrade would never end; install another release and move clients there by service.release" -}}
{{- end -}}
{{- end -}}
{{- end }}
