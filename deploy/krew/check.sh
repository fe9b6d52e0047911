# shellcheck shell=sh
# shellcheck disable=SC2154
# `kubectl postern check` and `version`: read by kubectl-postern, into which `cargo xtask release` puts it.

# One check's line of the report: its state, what was checked, what was found, and how to fix it.
say() {
  case $1 in
    BROKEN) worst=2 ;;
    WARNING) [ "$worst" -gt 1 ] || worst=1 ;;
  esac
  case $1$unfinished in BROKEN* | WARNING1) awaited=${awaited:-$2: $3} ;; esac
  report="$report$(printf '%-8s %-18s %s' "$1" "$2" "$3")
"
  [ -z "${4:-}" ] || report="$report           fix: $4
"
}

# Whether the first version, such as 6.1.0-18-amd64, is at least the second, such as 5.10. What is no version is not.
newer() {
  of=${1#*.}
  [ "${1%%.*}" -gt "${2%%.*}" ] || { [ "${1%%.*}" -eq "${2%%.*}" ] && [ "${of%%[!0-9]*}" -ge "${2#*.}" ]; }
} 2>/dev/null

# Collects rights that are missing, as `kubectl auth can-i` has them.
may() {
  case $(kube auth can-i "$@" 2>/dev/null </dev/null || :) in
    yes*) ;;
    *) missing="$missing${missing:+, }$*" ;;
  esac
}

# Name and kernel of the nodes in $nodes that have one of these labels.
labelled() {
  printf '%s\n' "$nodes" | awk -v "label=(^|,)($1)(,|\$)" '$NF ~ label { print $1, $(NF - 2) }'
}

before() {
  if ! server=$(kube get --raw=/version 2>&1); then
    say BROKEN 'API server' "$(echo "$server" | tail -n 1)" 'name the cluster: --context, --kubeconfig'
    return
  fi
  server=$(echo "$server" | tr -d ' \n' | sed -n 's/.*"major":"\([0-9]*\)[^"]*","minor":"\([0-9]*\).*/\1.\2/p')
  if ! newer "${server:-0.0}" 1.24; then
    say BROKEN Kubernetes "${server:-unknown}" 'update the cluster to 1.30'
  elif ! newer "$server" 1.30; then
    say WARNING Kubernetes "$server" 'add the component kubelet-credentials; there can be no redirectors'
  else
    say ok Kubernetes "$server"
  fi

  missing=
  for what in daemonsets.apps services configmaps serviceaccounts roles.rbac.authorization.k8s.io \
    rolebindings.rbac.authorization.k8s.io; do
    may create "$what"
  done
  for what in clusterroles.rbac.authorization.k8s.io clusterrolebindings.rbac.authorization.k8s.io; do
    may create "$what" --all-namespaces
  done
  # Nobody can give the servers a right that he does not have.
  may approve signers.certificates.k8s.io/postern.internal/agent --all-namespaces
  if [ -z "$missing" ]; then
    say ok 'rights to install' yes
  else
    say BROKEN 'rights to install' "missing: $missing" 'use a kubeconfig of an administrator'
  fi
  missing=
  may get pods
  may list pods
  may create pods --subresource=exec
  may create pods --subresource=portforward
  may get pods --subresource=log
  may list daemonsets.apps
  may list nodes --all-namespaces
  if [ -z "$missing" ]; then
    say ok 'rights to operate' yes
  else
    say WARNING 'rights to operate' "missing: $missing" 'the other commands of this plugin need them'
  fi

  level=$(kube get namespace "$namespace" \
    --output='jsonpath={.metadata.name}:{.metadata.labels.pod-security\.kubernetes\.io/enforce}' 2>/dev/null) || level=
  case $level in
    '') say WARNING namespace "$namespace is not there, or not to be seen" "kubectl create namespace $namespace" ;;
    *: | *:privileged) say ok namespace "$namespace" ;;
    *) say BROKEN namespace "$namespace admits pods by the standard ${level#*:}" \
      "kubectl label --overwrite namespace $namespace pod-security.kubernetes.io/enforce=privileged" ;;
  esac

  case $missing in *nodes*) return ;; esac
  if ! nodes=$(kube get nodes --output=wide --show-labels --no-headers 2>&1); then
    say BROKEN nodes "$(printf '%s\n' "$nodes" | tail -n 1)"
    return
  fi
  if [ -n "$chosen" ]; then
    hosts=$(kube get nodes --output=wide --show-labels --no-headers --selector="$chosen" | awk '{ print $1, $(NF - 2) }')
    [ -n "$hosts" ] || say BROKEN "servers' nodes" "none matches $chosen" 'correct the selector, or label nodes'
  else
    hosts=$(labelled 'node-role.kubernetes.io/(control-plane|controlplane|master)=[^,]*|node.kubernetes.io/microk8s-controlplane=[^,]*|node-restriction.kubernetes.io/postern-gateway=[^,]*')
    # The values may choose other nodes, and are not known here.
    [ -n "$hosts" ] || say WARNING masters 'no node has the label of one' \
      "--pre=SELECTOR of the servers' nodes, if you have chosen others; a managed control plane needs gateways: see the page of this name"
  fi
  while read -r host kernel; do
    if ! newer "$kernel" 0.0; then
      [ -z "$host" ] || say WARNING "kernel of $host" "$kernel: not a version" 'see uname -r on the host: it needs 5.10, better 6.1'
    elif ! newer "$kernel" 5.10; then
      say BROKEN "kernel of $host" "$kernel" 'update it to 5.10, better 6.1'
    elif ! newer "$kernel" 5.11; then
      say WARNING "kernel of $host" "$kernel" 'add the component kernel-5.10'
    elif ! newer "$kernel" 6.1; then
      say WARNING "kernel of $host" "$kernel: connects to a node without a tunnel are reset, not refused" 'update it to 6.1'
    else
      say ok "kernel of $host" "$kernel"
    fi
  done <<END
$hosts
END
  edges=$(labelled 'node-role.kubernetes.io/edge=[^,]*|openyurt.io/is-edge-worker=true|superedge.io/edge-node=enable' | grep -c .) || :
  if [ "$edges" -gt 0 ]; then
    say ok 'edge nodes' "$edges"
  else
    say WARNING 'edge nodes' 'no node has the label of one' 'kubectl label node NAME node-role.kubernetes.io/edge='
  fi
}

# Leaves the names of the nodes that are Ready, by the kubelet's own connection, in $ready; asks once a round.
ask_nodes() {
  [ -z "$ready" ] || return 0
  listed=$(kube get nodes --no-headers) || return
  ready=$(printf '%s\n' "$listed" | awk '$2 ~ /^Ready/ { print $1 }')
}

# Lines of this text that are names of Ready nodes, or with ! those that are not.
in_ready() {
  printf '%s\n=\n%s\n' "$ready" "$1" |
    awk -v "not=${2:-}" '$0 == "=" { second = 1; next } !second { known[$0]; next } $0 != "" && ($0 in known) == (not == "")'
}

# The lines of a text in one line, 50 at most.
some() {
  printf '%s\n' "$1" | awk 'NR <= 50 { printf "%s%s", space, $0; space = " " } END { if (NR > 50) printf " and %d more", NR - 50 }'
}

# Says what an update of the DaemonSet $name waits for.
updating() {
  offline=0
  if [ "$name" = tunnel-agent ] && ask_nodes; then
    offline=$(in_ready "$(nodes_of_agents)" ! | grep -c .) || :
  fi
  if [ "${seen:-0}" -ge "$generation" ] && [ "$strategy" = OnDelete ]; then
    say WARNING "$name" "$updated of $wanted nodes are updated" 'delete the pods of the others: its strategy is OnDelete'
  elif [ "${seen:-0}" -ge "$generation" ] && [ $((updated + offline)) -ge "$wanted" ]; then
    say WARNING "$name" "$updated of $wanted nodes are updated; $offline are not Ready" 'nothing, if they are offline'
  else
    unfinished=1
    say WARNING "$name" "is being updated: $updated of $wanted nodes" "kubectl -n $namespace describe daemonset $name"
  fi
}

rollouts() {
  format='{.metadata.name}|{.metadata.generation}|{.status.observedGeneration}|{.status.desiredNumberScheduled}'
  format="$format|{.status.updatedNumberScheduled}|{.status.numberAvailable}|{.spec.updateStrategy.type}"
  if ! rows=$(kube get daemonsets --selector='app.kubernetes.io/name in (tunnel-server, tunnel-redirector, tunnel-agent)' \
    --output="jsonpath={range .items[*]}$format{\"\\n\"}{end}" 2>&1); then
    say BROKEN DaemonSets "$(echo "$rows" | tail -n 1)"
    return
  fi
  for name in tunnel-server tunnel-redirector tunnel-agent; do
    row=$(printf '%s\n' "$rows" | grep "^$name|") || {
      [ $name = tunnel-redirector ] || say BROKEN $name "no such DaemonSet in namespace $namespace" 'install it, or give --namespace'
      continue
    }
    IFS='|' read -r _ generation seen wanted updated available strategy <<END
$row
END
    updated=${updated:-0}
    available=${available:-0}
    wanted=${wanted:-0}
    if [ "${seen:-0}" -lt "$generation" ] || [ "$updated" -lt "$wanted" ]; then
      updating
    elif [ "$wanted" -eq 0 ]; then
      state=BROKEN
      [ $name = tunnel-server ] || state=WARNING
      say "$state" $name 'no node matches its nodeAffinity' "kubectl -n $namespace describe daemonset $name"
    elif [ "$available" -lt "$wanted" ]; then
      state=BROKEN
      [ $name != tunnel-agent ] || state=WARNING
      say "$state" $name "$available of $wanted nodes have a pod that is ready" \
        "kubectl -n $namespace get pods --selector app.kubernetes.io/name=$name --output wide"
    else
      say ok $name "$available of $wanted nodes"
    fi
  done
}

# What servers and redirectors say together: src/status/summary.rs of the server has the lines.
nodes_and_versions() {
  # shellcheck disable=SC2046,SC2086
  ask $1 $(pods tunnel-redirector)
  for pod in $silent; do say BROKEN "$pod" 'does not answer' "kubectl -n $namespace describe pod $pod"; done
  [ -n "$first" ] || return 0
  shown --summary >"$work/summary" || {
    say BROKEN nodes "$first makes no summary of them"
    return
  }
  lines=$(cat "$work/summary")
  found=$(printf '%s\n' "$lines" | sed -n 's/^nodes: //p')
  # Names only: a server may lie.
  down=$(printf '%s\n' "$lines" | sed -n 's/^without a tunnel: //p' | tr ' ' '\n' | grep -E '^[a-z0-9][a-z0-9.-]*$') || :
  if [ -z "$down" ]; then
    say ok nodes "$found"
  elif ! ask_nodes; then
    say BROKEN nodes "$found; the cluster does not say whether the others are Ready: $(some "$down")" \
      'you need the right to list nodes'
  elif online=$(in_ready "$down") && [ -n "$online" ]; then
    say BROKEN nodes "$found; no tunnel, although the node is Ready: $(some "$online")" \
      'kubectl postern test NODE; on the node, the log of its agent (crictl logs)'
  else
    say WARNING nodes "$found; the others are not Ready: $(some "$down")" 'nothing, if they are offline'
  fi
  skew=$(printf '%s\n' "$lines" | sed -n 's/^skew: //p')
  found=$(printf '%s\n' "$lines" | sed -n 's/^tunnel-server \(.*\): .*/\1/p')
  [ -n "$skew" ] || [ -z "$found" ] || say ok versions "$found"
  while read -r line; do
    case $line in
      '') continue ;;
      *'not supported'*) state=BROKEN ;;
      *) state=WARNING ;;
    esac
    say "$state" versions "$line"
  done <<END
$skew
END
}

# Says what doctor found in a server.
examined() {
  said=$(cat "$work/$turn.err" "$work/$turn.out")
  counts=$(printf '%s\n' "$said" | grep -E '^[0-9]+ ok, ') || {
    say BROKEN "$1" "doctor: $(printf '%s\n' "$said" | head -n 1)"
    return 0
  }
  answering="$answering $1"
  case $code in 0) state=ok ;; 1) state=WARNING ;; *) state=BROKEN ;; esac
  say "$state" "$1" "doctor: $counts"
  details=$(printf '%s\n' "$said" | grep -E '^(WARNING|BROKEN|  )') || return 0
  report="$report$(printf '%s\n' "$details" | sed 's/^/  /')
"
}

after() {
  rollouts
  if ! list=$(pods tunnel-server 2>&1) || [ -z "$list" ]; then
    say BROKEN servers "${list:-no pod of tunnel-server runs in namespace $namespace}"
    return
  fi
  answering=
  within 180
  at_once in_server examined doctor
  # To ask one again that does not answer takes as long again.
  nodes_and_versions "$answering"
}

check() {
  round=after
  chosen=
  longest=0
  for word in "$@"; do
    case $word in
      --pre | --pre=*)
        round=before
        chosen=${word#--pre}
        chosen=${chosen#=}
        ;;
      --wait) longest=300 ;;
      --wait=*)
        longest=$(seconds "${word#*=}")
        [ -n "$longest" ] || fail "$word: not a duration such as 90s, 5m or 1h"
        ;;
      *) fail "check: $word is not known" ;;
    esac
  done
  until=$(($(date +%s) + longest))
  while :; do
    report=
    worst=0
    unfinished=
    awaited=
    ready=
    $round
    if [ "$worst" -lt 2 ] && [ -z "$unfinished" ]; then break; fi
    if [ "$(date +%s)" -ge "$until" ]; then
      [ "$longest" -eq 0 ] || [ "$worst" -eq 2 ] || say BROKEN wait "after $longest s: $awaited"
      break
    fi
    echo "waiting: $awaited" >&2
    sleep 3
  done
  printf '%s' "$report"
  exit "$worst"
}

version() {
  echo "kubectl-postern $version"
  found=$(servers)
  # shellcheck disable=SC2046,SC2086
  ask $found $(pods tunnel-redirector)
  [ -n "$first" ] || exit 1
  shown --summary >"$work/summary"
  grep -Ev '^(nodes|without a tunnel): ' "$work/summary" || :
  [ -z "$silent" ]
}
