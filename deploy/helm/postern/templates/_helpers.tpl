{{/* Labels of every object. */}}
{{- define "postern.labels" -}}
app.kubernetes.io/part-of: postern
{{- end }}

{{/* An image: (list . "tunnel-server"). */}}
{{- define "postern.image" -}}
{{- $root := index . 0 -}}
{{- printf "%s/postern/%s:%s" $root.Values.image.registry (index . 1) ($root.Values.image.tag | default $root.Chart.AppVersion) -}}
{{- end }}

{{/* Labels that distributions give to masters, as a list in JSON: kubeadm, k3s and most others; RKE1; before 1.24; MicroK8s. */}}
{{- define "postern.masters" -}}
["node-role.kubernetes.io/control-plane","node-role.kubernetes.io/controlplane","node-role.kubernetes.io/master","node.kubernetes.io/microk8s-controlplane"]
{{- end }}

{{/* Expressions that match no master. */}}
{{- define "postern.notMasters" -}}
{{- range $at, $label := include "postern.masters" . | fromJsonArray }}
{{- if $at }}
{{ end -}}
- key: {{ $label }}
  operator: DoesNotExist
{{- end }}
{{- end }}

{{/* The nodes of gateways. */}}
{{- define "postern.gateways" -}}
- matchExpressions:
    - key: node-restriction.kubernetes.io/postern-gateway
      operator: Exists
{{- end }}

{{/* The volume of /dev/net/tun: (list . "mount") or (list . "volume"). The folder, as a host may have no such device. */}}
{{- define "postern.tun" -}}
{{- if (index . 0).Values.server.podsByRoute -}}
- name: tun
{{- if eq (index . 1) "mount" }}
  mountPath: /dev/net
  readOnly: true
{{- else }}
  hostPath:
    path: /dev/net
    type: DirectoryOrCreate
{{- end }}
{{- end }}
{{- end }}

{{/* The edge nodes' labels, given or not, as a list in JSON. */}}
{{- define "postern.edgeNodes" -}}
{{- if .Values.edgeNodes -}}
{{- toJson .Values.edgeNodes -}}
{{- else -}}
[{"key":"openyurt.io/is-edge-worker","values":["true"]},{"key":"superedge.io/edge-node","values":["enable"]},{"key":"node-role.kubernetes.io/edge"}]
{{- end -}}
{{- end }}

{{/* The same as a selector, in the form of --edge-selector. */}}
{{- define "postern.edgeSelector" -}}
{{- $terms := list -}}
{{- range .Values.edgeNodes -}}
{{- if not .values -}}
{{- $terms = append $terms .key -}}
{{- else if eq (len .values) 1 -}}
{{- $terms = append $terms (printf "%s=%s" .key (first .values)) -}}
{{- else -}}
{{- $terms = append $terms (printf "%s in (%s)" .key (join "," .values)) -}}
{{- end -}}
{{- end -}}
{{- join " || " $terms -}}
{{- end }}

{{- define "postern.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Contradictions that a schema cannot express. */}}
{{- define "postern.check" -}}
{{- if and .Values.service.externalAddresses (ne .Values.service.type "ClusterIP") -}}
{{- fail (printf "service.externalAddresses: only with service.type ClusterIP, and it is %s" .Values.service.type) -}}
{{- end -}}
{{- if and .Values.service.nodePort (eq .Values.service.type "ClusterIP") -}}
{{- fail "service.nodePort: a Service of type ClusterIP has none; set service.type to NodePort or LoadBalancer" -}}
{{- end -}}
{{- if and .Values.service.externalTrafficPolicy (eq .Values.service.type "ClusterIP") -}}
{{- fail "service.externalTrafficPolicy: a Service of type ClusterIP has none" -}}
{{- end -}}
{{- if and (or .Values.service.loadBalancerSourceRanges .Values.service.loadBalancerClass) (ne .Values.service.type "LoadBalancer") -}}
{{- fail (printf "service.loadBalancerSourceRanges and loadBalancerClass: only with service.type LoadBalancer, and it is %s" .Values.service.type) -}}
{{- end -}}
{{- if and .Values.server.plainClients (eq (int .Values.server.ports.plain) 0) -}}
{{- fail "server.plainClients: the plain listener is off; set server.ports.plain" -}}
{{- end -}}
{{- if and .Values.agent.allowTargets .Values.server.edgePodRoutes -}}
{{- fail "agent.allowTargets: with server.edgePodRoutes agents take the ranges of pods from their Nodes; name the ranges in allowTargets with extraArgs --edge-pod-routes instead" -}}
{{- end -}}
{{- if and .Values.redirector.enabled (or .Values.server.nodeSelectorTerms .Values.server.gateway) (not .Values.redirector.nodeSelectorTerms) -}}
{{- fail "redirector.nodeSelectorTerms: servers run where server.nodeSelectorTerms says, or on gateways with server.gateway, and no redirector may run there: name other nodes" -}}
{{- end -}}
{{- if and .Values.redirector.gateway (not .Values.redirector.enabled) -}}
{{- fail "redirector.gateway: there are no redirectors; set redirector.enabled" -}}
{{- end -}}
{{- if or .Values.server.gateway .Values.redirector.gateway -}}
{{- if not .Values.server.podsByRoute -}}
{{- fail "server.podsByRoute: a gateway takes connections by route only: leave it at true" -}}
{{- end -}}
{{- if not .Values.server.redirectClients -}}
{{- fail "server.redirectClients: a gateway would serve its own pods only: name the clients" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.redirector.metrics.enabled (not .Values.redirector.enabled) -}}
{{- fail "redirector.metrics.enabled: there are no redirectors; set redirector.enabled" -}}
{{- end -}}
{{- if and .Values.monitoring.rules (not .Values.server.metrics.enabled) -}}
{{- fail "monitoring.rules: Prometheus would get no metrics of servers, which the alerts are about: set server.metrics.enabled" -}}
{{- end -}}
{{- if .Values.monitoring.podMonitor -}}
{{- $tunnelled := false -}}
{{- range .Values.tunnelledPorts.loopback -}}
{{- if eq (int .) (int $.Values.agent.adminPort) -}}{{- $tunnelled = true -}}{{- end -}}
{{- end -}}
{{- if not $tunnelled -}}
{{- fail (printf "monitoring.podMonitor: agents answer on their loopback only: add %d to tunnelledPorts.loopback" (int .Values.agent.adminPort)) -}}
{{- end -}}
{{- end -}}
{{- end }}
