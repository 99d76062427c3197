{{- /* Mistakes that neither the schema nor kvcast can detect. */ -}}
{{- define "kvcast.validate" -}}
{{- if eq (default .Chart.AppVersion .Values.image.tag) "latest" }}
{{- fail "image.tag is latest, which is another version after each release: want a version, or image.digest" }}
{{- end }}
{{- include "kvcast.validateJournal" . }}
{{- include "kvcast.validateServers" . }}
{{- include "kvcast.validatePorts" . }}
{{- include "kvcast.validateDisruption" . }}
{{- include "kvcast.validateResources" (dict "name" "resources" "of" .Values.resources) }}
{{- include "kvcast.validateResources" (dict "name" "serveOnly.resources" "of" .Values.serveOnly.resources) }}
{{- if and .Values.tls.clientCertificates (not .Values.tls.secret) }}
{{- fail "tls.clientCertificates is true: want tls.secret as well" }}
{{- end }}
{{- if and .Values.auth.certificates (not .Values.tls.clientCertificates) }}
{{- fail "auth.certificates is not empty: want tls.clientCertificates true as well" }}
{{- end }}
{{- range list "listen" "admin" "listeners" "discovery" "workers" "auth" "tls" }}
{{- if hasKey (default dict $.Values.config) . }}
{{- fail (printf "config.%s is not allowed: the chart sets it; see README.md for the value that does" .) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvcast.validateJournal" -}}
{{- $journal := .Values.journal }}
{{- if and (eq $journal.store "nats") (not $journal.nats.servers) }}
{{- fail "journal.nats.servers is empty: want URLs such as nats://nats:4222 with journal.store nats" }}
{{- end }}
{{- if and $journal.nats.clientCertificate (not $journal.nats.tlsSecret) }}
{{- fail "journal.nats.clientCertificate is true: want journal.nats.tlsSecret as well, with the keys tls.crt and tls.key" }}
{{- end }}
{{- range list "store" "stream" "replicas" "credentials" "tls_ca" "tls_cert" "tls_key" }}
{{- if hasKey (default dict (default dict $.Values.config).journal) . }}
{{- fail (printf "config.journal.%s is not allowed: the chart sets it from the values under journal" .) }}
{{- end }}
{{- end }}
{{- if eq $journal.store "file" }}
{{- $max := default "64MiB" (default dict (default dict .Values.config).journal).max_bytes }}
{{- if lt (include "kvcast.quantity" $journal.file.size | float64) (include "kvcast.quantity" $max | float64) }}
{{- fail (printf "journal.file.size is %s, less than config.journal.max_bytes (%v): the volume has the retained entries, and checkpoints beside them" $journal.file.size $max) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvcast.validateServers" -}}
{{- if and (ne .Values.journal.store "nats") (gt (int .Values.replicas) 1) .Values.listeners }}
{{- fail (printf "replicas is %v with listeners and the journal in %s: each pod would have other engines; want replicas 1, journal.store nats, or listeners [] with discovery or workers" .Values.replicas .Values.journal.store) }}
{{- end }}
{{- $cluster := default dict (default dict .Values.config).cluster }}
{{- if and (hasKey $cluster "ingest") (not $cluster.ingest) }}
{{- fail "config.cluster.ingest is false: want serveOnly.replicas for servers that read no engines" }}
{{- end }}
{{- if include "kvcast.hasServeOnly" . }}
{{- if ne .Values.journal.store "nats" }}
{{- fail (printf "serveOnly has servers with the journal in %s: want journal.store nats, which several servers share" .Values.journal.store) }}
{{- end }}
{{- with .Values.serveOnly.autoscaling }}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) }}
{{- fail (printf "serveOnly.autoscaling.minReplicas is %v, more than maxReplicas (%v)" .minReplicas .maxReplicas) }}
{{- end }}
{{- end }}
{{- else if and (hasKey $cluster "serve") (not $cluster.serve) }}
{{- fail "config.cluster.serve is false without servers of serveOnly: no server would answer routers; want serveOnly.replicas 1 or more" }}
{{- end }}
{{- end }}

{{- /* The ports of config.egress, as a JSON object from ports to keys. Those at a loopback address are for containers of the pod. */ -}}
{{- define "kvcast.egressPorts" -}}
{{- $ports := dict }}
{{- $egress := default dict (default dict .Values.config).egress }}
{{- with (default dict $egress.dynamo).listen }}
{{- include "kvcast.addPort" (dict "to" $ports "endpoint" . "key" "config.egress.dynamo.listen" "ranks" 1) }}
{{- end }}
{{- $zmq := default dict $egress.zmq }}
{{- with $zmq.bind }}
{{- include "kvcast.addPort" (dict "to" $ports "endpoint" . "key" "config.egress.zmq.bind" "ranks" 1) }}
{{- end }}
{{- range $i, $p := $zmq.publishers }}
{{- range list "bind" "replay" }}
{{- $key := printf "config.egress.zmq.publishers[%d].%s" $i . }}
{{- with get $p . }}
{{- include "kvcast.addPort" (dict "to" $ports "endpoint" . "key" $key "ranks" (default 1 $p.dp_size)) }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $ports }}
{{- end }}

{{- define "kvcast.addPort" -}}
{{- $endpoint := toString .endpoint }}
{{- if and (regexMatch ":[0-9]+$" $endpoint) (not (regexMatch "(localhost|127\\.[0-9.]+|\\[::1\\]):[0-9]+$" $endpoint)) }}
{{- $first := regexFind "[0-9]+$" $endpoint | int }}
{{- range $i := until (int .ranks) }}
{{- $_ := set $.to (toString (add $first $i)) $.key }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvcast.validatePorts" -}}
{{- $names := dict "grpc" "the gRPC port" "admin" "the admin port" }}
{{- $ports := dict "50051" "the gRPC port" "9464" "the admin port" }}
{{- range $value, $list := dict "listeners" .Values.listeners "routerPorts" .Values.routerPorts }}
{{- range $i, $p := $list }}
{{- $key := printf "%s[%d]" $value $i }}
{{- with get $ports (toString $p.port) }}
{{- fail (printf "%s.port is %v, which %s has: want another port" $key $p.port .) }}
{{- end }}
{{- with get $names $p.name }}
{{- fail (printf "%s.name is %s, which %s has: want another name" $key $p.name .) }}
{{- end }}
{{- $_ := set $ports (toString $p.port) $key }}
{{- $_ := set $names $p.name $key }}
{{- end }}
{{- end }}
{{- $egress := include "kvcast.egressPorts" . | fromJson }}
{{- range $i, $p := .Values.routerPorts }}
{{- if not (hasKey $egress (toString $p.port)) }}
{{- fail (printf "routerPorts[%d].port is %v, at which nothing listens: want a port of config.egress, such as that of {egress: {dynamo: {listen: \":%v\"}}}" $i $p.port $p.port) }}
{{- end }}
{{- end }}
{{- range $port, $key := $egress }}
{{- if not (hasKey $ports $port) }}
{{- fail (printf "%s is at port %s, which no entry of routerPorts has: routers could not reach it; want routerPorts [{name: NAME, port: %s}], or a loopback address" $key $port $port) }}
{{- else if not (hasPrefix "routerPorts" (get $ports $port)) }}
{{- fail (printf "%s is at port %s, which %s has: want another port" $key $port (get $ports $port)) }}
{{- end }}
{{- end }}
{{- range $name, $port := .Values.service.nodePorts }}
{{- if not (or (eq $name "grpc") (and (hasKey $names $name) (ne $name "admin"))) }}
{{- fail (printf "service.nodePorts.%s: there is no such port; want grpc, or the name of a listener or of an entry of routerPorts" $name) }}
{{- end }}
{{- end }}
{{- if and .Values.service.nodePorts (eq .Values.service.type "ClusterIP") }}
{{- fail "service.nodePorts is not empty: want service.type NodePort or LoadBalancer" }}
{{- end }}
{{- if and .Values.service.loadBalancerSourceRanges (ne .Values.service.type "LoadBalancer") }}
{{- fail "service.loadBalancerSourceRanges is not empty: want service.type LoadBalancer" }}
{{- end }}
{{- end }}

{{- define "kvcast.validateDisruption" -}}
{{- with .Values.podDisruptionBudget }}
{{- if .enabled }}
{{- $max := toString .maxUnavailable }}
{{- $min := toString .minAvailable }}
{{- if and $max $min }}
{{- fail "podDisruptionBudget has minAvailable and maxUnavailable: want one of them" }}
{{- end }}
{{- if has $max (list "0" "0%") }}
{{- fail (printf "podDisruptionBudget.maxUnavailable is %s, which blocks each drain of a node: want 1 or more, or podDisruptionBudget.enabled false" $max) }}
{{- end }}
{{- include "kvcast.validateMinAvailable" (dict "min" $min "replicas" $.Values.replicas "of" "replicas") }}
{{- if include "kvcast.hasServeOnly" $ }}
{{- $replicas := ternary $.Values.serveOnly.autoscaling.minReplicas $.Values.serveOnly.replicas $.Values.serveOnly.autoscaling.enabled }}
{{- include "kvcast.validateMinAvailable" (dict "min" $min "replicas" $replicas "of" "servers of serveOnly") }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvcast.validateMinAvailable" -}}
{{- if .min }}
{{- $available := .min | float64 }}
{{- if hasSuffix "%" .min }}
{{- $available = divf (mulf (trimSuffix "%" .min | float64) .replicas) 100 | ceil }}
{{- end }}
{{- if ge $available (float64 .replicas) }}
{{- fail (printf "podDisruptionBudget.minAvailable is %s of %v %s, which blocks each drain of a node: want fewer, or podDisruptionBudget.enabled false" .min .replicas .of) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvcast.validateResources" -}}
{{- $name := .name }}
{{- $limits := default dict .of.limits }}
{{- range $resource, $request := default dict .of.requests }}
{{- $limit := get $limits $resource }}
{{- if and $request $limit (gt (include "kvcast.quantity" $request | float64) (include "kvcast.quantity" $limit | float64)) }}
{{- fail (printf "%s.requests.%s is %v, more than %s.limits.%s (%v)" $name $resource $request $name $resource $limit) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The number that a quantity of Kubernetes, or a size of kvcast such as 64MiB, stands for. */ -}}
{{- define "kvcast.quantity" -}}
{{- $text := . }}
{{- if not (kindIs "string" $text) }}
{{- $text = printf "%f" (float64 $text) }}
{{- end }}
{{- $unit := regexFind "[A-Za-z]*$" $text }}
{{- $units := dict "" 1 "B" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "KiB" 1024 "MiB" 1048576 "GiB" 1073741824 }}
{{- if not (and (hasKey $units $unit) (regexMatch "^[0-9]+(\\.[0-9]+)?[A-Za-z]*$" $text)) }}
{{- fail (printf "%q is not a quantity: want a number, or one followed by m, k, M, G, T, Ki, Mi, Gi or Ti" $text) }}
{{- end }}
{{- mulf (trimSuffix $unit $text | float64) (get $units $unit) }}
{{- end }}
