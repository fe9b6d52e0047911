# shellcheck shell=sh
# shellcheck disable=SC2034,SC2154
# Programs in pods, several at the same time, and none for ever: read by kubectl-postern, into which `cargo xtask release` puts it.

# What pods print, until the end.
work=$(mktemp -d)
# Number of the word in $list that is run or heard, or 0.
turn=0
# Processes that this shell has to end: those in the background do not get Ctrl-C.
running=
starting=
stopped=
# Set in a worker.
worker=
# A file for the program's standard input. Without one it is the terminal, at which kubectl may have to ask for a password.
input=
if [ -t 0 ]; then exec 6<&0; else exec 6</dev/null; fi
# The exit code after Ctrl-C.
interrupted=130

end() {
  trap '' INT TERM HUP
  [ -n "$worker" ] || : >"$work/ended"
  if [ -n "$running" ]; then
    # shellcheck disable=SC2086
    { kill $running || :; wait $running || :; } 2>/dev/null
  fi
  [ -n "$worker" ] || rm -rf "$work"
}

heed() {
  trap end EXIT
  trap 'stopped=1; [ -n "$starting" ] || exit "$interrupted"' INT TERM HUP
}
heed

# First of all in a process of this shell: a signal that comes before it has traps of its own is lost in some shells.
late() {
  [ ! -e "$work/ended" ] || exit "$interrupted"
}

# Behind what is started in the background, with `starting` before it, so that no signal comes between.
started() {
  running="$running $!"
  starting=
  [ -z "$stopped" ] || exit "$interrupted"
}

# How many seconds a pod may say nothing. kubectl's --request-timeout does not end `exec`.
within() {
  limit=${patience:-$1}
}

# Ends a process that prints nothing more for $limit seconds into the files of its turn. Ends itself soon after the process.
guard() {
  quiet=0
  before=
  while sleep 1 && [ -e "$work/$1.runs" ]; do
    # Its shell heeds no signal that came as it began to wait, if it is bash, before the process has ended.
    [ ! -e "$work/ended" ] || kill "$1" 2>/dev/null || return 0
    printed=$(wc -c "$work/$turn."* 2>/dev/null | tail -n 1)
    quiet=$((quiet + 1))
    [ "$printed" = "$before" ] || quiet=0
    before=$printed
    if [ "$quiet" -ge "$limit" ]; then
      # First the words: its shell reads them once it has ended.
      kill -0 "$1" && echo "kubectl postern: no answer for $limit s" >&2 && kill "$1"
      return
    fi
  done
}

replaced_by_kubectl() {
  late
  eval "exec $kubectl"
}

# kubectl in the background, as a signal to this shell waits for the end of what is in the foreground.
limited() {
  starting=1
  if [ -n "$input" ]; then replaced_by_kubectl "$@" <"$input" & else replaced_by_kubectl "$@" <&6 & fi
  started
  child=$!
  : >"$work/$child.runs"
  guard "$child" >/dev/null &
  code=0
  wait "$child" 2>/dev/null || code=$?
  rm -f "$work/$child.runs"
  running=
  return "$code"
}

# `kubectl exec`: ends with the exit code of the program in the pod, which kubectl names, or with $failure if there is none.
exec_in() {
  said=$work/$turn.said
  code=0
  limited exec "$@" 2>"$said" || code=$?
  sed '${/^command terminated with exit code /d;}' "$said" >&2
  [ "$code" -ne 0 ] || return 0
  code=$(sed -n '$s/^command terminated with exit code //p' "$said")
  return "${code:-$failure}"
}

# Runs a command in a server's or redirector's pod.
in_server() {
  pod=$1
  shift
  case $pod in tunnel-redirector-*) container=tunnel-redirector ;; *) container=tunnel-server ;; esac
  exec_in "$pod" ${input:+--stdin} --container=$container -- /tunnel-server "$@"
}

# One of eight that share the words of $list. Those that wait for a pod that is offline hold up no others.
worker() {
  worker=1
  running=
  starting=
  heed
  late
  turn=0
  for word in $list; do
    turn=$((turn + 1))
    [ $(((turn - me) % 8)) -eq 0 ] || continue
    code=0
    "$run" "$word" "$@" >"$work/$turn.out" 2>"$work/$turn.err" || code=$?
    echo "$code" >"$work/$turn.code"
  done
}

# RUN HEARD [ARGUMENT...]: `RUN WORD ARGUMENT...` for each word of $list, for eight of them at the same time; and in their order
# `HEARD WORD`, with what was printed in $work/$turn.out and .err, and its exit code in $code.
at_once() {
  run=$1
  heard=$2
  shift 2
  me=0
  for word in $list; do
    [ "$me" -lt 8 ] || break
    me=$((me + 1))
    starting=1
    worker "$@" &
    started
  done
  turn=0
  for word in $list; do
    turn=$((turn + 1))
    at=0
    for process in $running; do
      at=$((at + 1))
      # One that is waited for again is no child any more.
      [ $(((turn - at) % 8)) -ne 0 ] || wait "$process" 2>/dev/null || :
    done
    code=$failure
    read -r code 2>/dev/null <"$work/$turn.code" || :
    rm -f "$work/$turn.code"
    "$heard" "$word"
  done
  running=
  turn=0
}

shown_whole() {
  echo "== $1" >&2
  cat "$work/$turn.err" >&2
  cat "$work/$turn.out"
  [ "$code" -le "$worst" ] || worst=$code
}

# Runs a command in every server's pod; ends with the worst exit code.
everywhere() {
  list=$(servers)
  worst=0
  at_once in_server shown_whole "$@"
  exit "$worst"
}

# Runs a command in the first server's pod.
in_one() {
  found=$(servers)
  in_server "$(echo "$found" | head -n 1)" "$@"
}

# Runs a command in one server's pod after the other, until it succeeds: only one of them has what it is about.
in_the_right_one() {
  found=$(servers)
  for pod in $found; do
    if in_server "$pod" "$@"; then exit 0; fi
  done
  echo "kubectl postern: no server could do it" >&2
  exit 1
}

told() {
  if [ "$code" -eq 0 ]; then
    cat "$work/$turn.out" >>"$work/answers"
    echo >>"$work/answers"
    first=${first:-$1}
  else
    cat "$work/$turn.err" >&2
    echo "kubectl postern: $1 does not answer" >&2
    silent="$silent $1"
  fi
}

# Asks these pods for their status. Leaves in $first and $silent a pod that answers, and those that do not.
ask() {
  list=$*
  first=
  silent=
  : >"$work/answers"
  within 30
  at_once in_server told status --output=json
}

# Has a pod make a text of the answers.
shown() {
  input=$work/answers
  code=0
  in_server "$first" status --from=- "$@" || code=$?
  input=
  return "$code"
}
