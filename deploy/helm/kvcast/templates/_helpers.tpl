{{- define "kvcast.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* 54 characters leave room for the suffix -headless. */ -}}
{{- define "kvcast.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 54 | trimSuffix "-" }}
{{- else if contains (include "kvcast.name" .) .Release.Name }}
{{- .Release.Name | trunc 54 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "kvcast.name" .) | trunc 54 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "kvcast.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvcast.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvcast.labels" -}}
{{ include "kvcast.selectorLabels" . }}
app.kubernetes.io/version: {{ default .Chart.AppVersion .Values.image.tag | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvcast.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "kvcast.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- /* Whether kvcast needs the Kubernetes API: "true" or "". */ -}}
{{- define "kvcast.discoversPods" -}}
{{- range .Values.discovery }}{{ if or .kubernetes .inference_pool }}true{{ end }}{{ end }}
{{- end }}

{{- /* The configuration file: the values of config, and over them what the chart decides. */ -}}
{{- define "kvcast.config" -}}
{{- $config := deepCopy .Values.config }}
{{- $_ := set $config "listen" ":50051" }}
{{- $_ := set $config "admin" ":9464" }}
{{- $journal := dict }}
{{- with .Values.journal }}
{{- if eq .store "file" }}
{{- $journal = dict "store" "file:/var/lib/kvcast/journal" }}
{{- else if eq .store "nats" }}
{{- $journal = dict "store" (join "," .nats.servers) "stream" .nats.stream "replicas" .nats.replicas }}
{{- if .nats.credentialsSecret }}
{{- $_ := set $journal "credentials" "/etc/kvcast/nats/nats.creds" }}
{{- end }}
{{- if .nats.tlsSecret }}
{{- $_ := set $journal "tls_ca" "/etc/kvcast/nats-tls/ca.crt" }}
{{- if .nats.clientCertificate }}
{{- $_ := set $journal "tls_cert" "/etc/kvcast/nats-tls/tls.crt" }}
{{- $_ := set $journal "tls_key" "/etc/kvcast/nats-tls/tls.key" }}
{{- end }}
{{- end }}
{{- else }}
{{- $journal = dict "store" "memory" }}
{{- end }}
{{- end }}
{{- $_ := set $config "journal" (mustMergeOverwrite (deepCopy (default dict $config.journal)) $journal) }}
{{- $auth := dict "open_registration" .Values.auth.openRegistration }}
{{- if .Values.auth.tokensSecret }}
{{- $_ := set $auth "tokens" "/etc/kvcast/auth/tokens" }}
{{- end }}
{{- if .Values.auth.certificates }}
{{- $_ := set $auth "certificates" "/etc/kvcast/config/certificates" }}
{{- end }}
{{- $_ := set $config "auth" $auth }}
{{- if .Values.tls.secret }}
{{- $tls := dict "cert" "/etc/kvcast/tls/tls.crt" "key" "/etc/kvcast/tls/tls.key" }}
{{- if .Values.tls.clientCertificates }}
{{- $_ := set $tls "client_ca" "/etc/kvcast/tls/ca.crt" }}
{{- end }}
{{- $_ := set $config "tls" $tls }}
{{- end }}
{{- $listeners := list }}
{{- range .Values.listeners }}
{{- $listeners = append $listeners (merge (dict "bind" (printf "tcp://*:%v" .port)) (omit . "name" "port")) }}
{{- end }}
{{- $_ := set $config "listeners" $listeners }}
{{- $_ := set $config "discovery" .Values.discovery }}
{{- $_ := set $config "workers" .Values.workers }}
{{- toYaml $config }}
{{- end }}

{{- /* Mistakes that neither the schema nor kvcast can detect. */ -}}
{{- define "kvcast.validate" -}}
{{- if and (eq .Values.journal.store "nats") (not .Values.journal.nats.servers) }}
{{- fail "journal.nats.servers is empty: want URLs such as nats://nats:4222 with journal.store nats" }}
{{- end }}
{{- if and (ne .Values.journal.store "nats") (gt (int .Values.replicas) 1) .Values.listeners }}
{{- fail (printf "replicas is %v with listeners and the journal in %s: each pod would have other engines; want replicas 1, journal.store nats, or listeners [] with discovery or workers" .Values.replicas .Values.journal.store) }}
{{- end }}
{{- if and .Values.tls.clientCertificates (not .Values.tls.secret) }}
{{- fail "tls.clientCertificates is true: want tls.secret as well" }}
{{- end }}
{{- if and .Values.auth.certificates (not .Values.tls.clientCertificates) }}
{{- fail "auth.certificates is not empty: want tls.clientCertificates true as well" }}
{{- end }}
{{- range list "listen" "admin" "listeners" "discovery" "workers" "auth" "tls" }}
{{- if hasKey $.Values.config . }}
{{- fail (printf "config.%s is not allowed: the chart sets it; see README.md for the value that does" .) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The admin port has TLS if the configuration says so. */}}
{{- define "kvcast.adminScheme" -}}
{{ ternary "HTTPS" "HTTP" (default false .Values.config.admin_tls) }}
{{- end }}
