{{/* terminationGracePeriodSeconds: (list DRAIN TIMES); with the default of 10 s it is that of the manifests. */}}
{{- define "postern.grace" -}}
{{- $text := index . 0 -}}
{{- $number := regexFind "^[0-9]+" $text | int -}}
{{- $seconds := $number -}}
{{- if hasSuffix "ms" $text -}}
{{- $seconds = div (add $number 999) 1000 -}}
{{- else if hasSuffix "m" $text -}}
{{- $seconds = mul $number 60 -}}
{{- else if hasSuffix "h" $text -}}
{{- $seconds = mul $number 3600 -}}
{{- end -}}
{{- add (mul $seconds (index . 1)) 10 -}}
{{- end }}

{{/* What is redirected: the same on every host. */}}
{{- define "postern.redirectArgs" -}}
{{- if not .Values.server.podsByRoute }}
- --redirect-pods=connect
{{- end }}
{{- with .Values.server.edgeAddresses }}
- "--edge-addresses={{ join "," . }}"
{{- end }}
{{- with .Values.server.serviceCIDRs }}
- "--service-cidrs={{ join "," . }}"
{{- end }}
{{- with .Values.server.exclude }}
- "--exclude={{ join "," . }}"
{{- end }}
{{- with .Values.server.redirectClients }}
- "--redirect-clients={{ join "," . }}"
{{- end }}
{{- with .Values.server.edgePodRoutes }}
- "--edge-pod-routes={{ join "," . }}"
{{- end }}
{{- end }}

{{- define "postern.gatewayArgs" }}
- --redirect-pods=route
- --gateway
{{- end }}

{{- define "postern.redirectorArgs" -}}
- redirector
- --state-dir=/var/lib/postern/redirector
- "--drain-timeout={{ .Values.redirector.drainTimeout }}"
{{- if .Values.redirector.gateway }}
{{- include "postern.gatewayArgs" . }}
{{- end }}
{{- include "postern.redirectArgs" . }}
{{- if .Values.redirector.metrics.enabled }}
- "--metrics-port={{ .Values.redirector.metrics.port }}"
{{- with .Values.server.bindAddress }}
- "--bind-address={{ . }}"
{{- end }}
{{- end }}
{{- range .Values.redirector.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "postern.serverArgs" -}}
- "--drain-timeout={{ .Values.server.drainTimeout }}"
{{- with .Values.server.bindAddress }}
- "--bind-address={{ . }}"
{{- end }}
{{- $ports := .Values.server.ports }}
{{- if ne (int $ports.agents) 10262 }}
- "--agent-port={{ $ports.agents }}"
{{- end }}
{{- if ne (int $ports.https) 10263 }}
- "--secure-port={{ $ports.https }}"
{{- end }}
{{- if ne (int $ports.http) 10264 }}
- "--insecure-port={{ $ports.http }}"
{{- end }}
{{- if ne .Values.server.dnsConfigMap "tunnel-nodes" }}
- "--dns-configmap={{ .Values.server.dnsConfigMap }}"
{{- end }}
{{- if .Values.server.gateway }}
{{- include "postern.gatewayArgs" . }}
{{- end }}
{{- include "postern.redirectArgs" . }}
{{- if .Values.server.nodeCondition }}
- --node-condition=on
{{- end }}
{{- if .Values.server.httpsCallers.enabled }}
- --terminate-tls=on
- --kubelet-client-certificate=/etc/postern/kubelet-client/tls.crt
- --kubelet-client-key=/etc/postern/kubelet-client/tls.key
{{- end }}
{{- if .Values.server.connect.enabled }}
- "--connect-port={{ $ports.connect }}"
- --policy=/etc/postern/policy/policy.yaml
{{- end }}
{{- if .Values.server.metrics.enabled }}
- "--metrics-port={{ $ports.metrics }}"
{{- end }}
{{- if .Values.server.egressServices }}
- --egress-services=on
{{- end }}
{{- if .Values.server.konnectivityAgents.enabled }}
- "--konnectivity-agent-port={{ $ports.konnectivityAgents }}"
{{- end }}
{{- if ne (int $ports.plain) 0 }}
- "--plain-port={{ $ports.plain }}"
{{- end }}
{{- with .Values.server.plainClients }}
- "--plain-clients={{ join "," . }}"
{{- end }}
{{- range .Values.server.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "postern.agentArgs" -}}
- "--drain-timeout={{ .Values.agent.drainTimeout }}"
{{- with .Values.agent.servers }}
- "--server={{ join "," . }}"
{{- end }}
{{- if .Values.server.edgePodRoutes }}
- --pod-targets=on
{{- end }}
{{- with .Values.tunnelledPorts.loopback }}
{{- if ne (join "," .) "10266" }}
- "--loopback-ports={{ join "," . }}"
{{- end }}
{{- end }}
{{- range .Values.agent.allowTargets }}
- {{ printf "--allow-target=%s" . | quote }}
{{- end }}
{{- if .Values.agent.kubeletCredentials.enabled }}
- "--kubeconfig={{ .Values.agent.kubeletCredentials.kubeconfig }}"
{{- end }}
{{- range .Values.agent.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "postern.serverEnv" -}}
{{- include "postern.redirectEnv" (list . .Values.server.ports.admin) }}
{{- end }}

{{- define "postern.redirectorEnv" -}}
{{- include "postern.redirectEnv" (list . .Values.redirector.adminPort) }}
{{- end }}

{{/* (list . ADMIN-PORT) */}}
{{- define "postern.redirectEnv" -}}
{{- $values := (index . 0).Values -}}
# Whose pods may use the redirect; a redirector's certificate names it.
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
# --bpffs. Not below /sys: AppArmor's profile for containers denies writing there.
- name: POSTERN_BPFFS
  value: /bpf
# --configmap and --edge-selector.
- name: POSTERN_CONFIGMAP
  value: {{ $values.server.configMap | quote }}
- name: POSTERN_EDGE_SELECTOR
  value: {{ include "postern.edgeSelector" (index . 0) | quote }}
{{- if ne (int (index . 1)) 10265 }}
# --admin-address, for the commands in the pod too.
- name: POSTERN_ADMIN_ADDRESS
  value: "127.0.0.1:{{ index . 1 }}"
{{- end }}
{{- end }}

{{- define "postern.agentEnv" -}}
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: NODE_IP
  valueFrom:
    fieldRef:
      fieldPath: status.hostIP
{{- if ne (int .Values.agent.adminPort) 10266 }}
# --admin-address, for the commands in the pod too.
- name: POSTERN_ADMIN_ADDRESS
  value: "127.0.0.1:{{ .Values.agent.adminPort }}"
{{- end }}
{{- if .Values.agent.kubeletCredentials.enabled }}
# The kubeconfig names no namespace.
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
{{- end }}
{{- with .Values.agent.apiServer.host }}
- name: KUBERNETES_SERVICE_HOST
  value: {{ . | quote }}
- name: KUBERNETES_SERVICE_PORT
  value: {{ $.Values.agent.apiServer.port | quote }}
{{- end }}
{{- with .Values.agent.proxy }}
- name: HTTPS_PROXY
  value: {{ . | quote }}
{{- end }}
{{- with .Values.agent.noProxy }}
- name: NO_PROXY
  value: {{ . | quote }}
{{- end }}
{{- end }}
