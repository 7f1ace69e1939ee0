# shellcheck shell=bash
# SPDX-License-Identifier: LGPL-2.1-or-later
# Runs the steps of a long job and shows how far it is, on stderr. Sourced by bash.

PROGRESS_CHILD=

# progress_stop: ends the step that is running, with all its processes
progress_stop() {
  local pid=$PROGRESS_CHILD
  [ -n "$pid" ] || return 0
  PROGRESS_CHILD=
  kill -TERM -- "-$pid" 2>/dev/null || return 0
  for _ in {1..50}; do
    kill -0 -- "-$pid" 2>/dev/null || return 0
    sleep 0.1
  done
  kill -KILL -- "-$pid" 2>/dev/null || true
}

# progress_step STEP TEXT LOG COUNTER COMMAND...
# COUNTER: a command that prints "DONE TOTAL" when it is given LOG, or "" for none
progress_step() {
  local step=$1 text=$2 log=$3 counter=$4 started=$SECONDS code=0
  shift 4
  [ -t 2 ] || echo "[$step] $text" >&2
  # a process group of its own, so that all of the step can be stopped
  set -m
  "$@" >"$log" 2>&1 </dev/null &
  PROGRESS_CHILD=$!
  set +m
  while kill -0 "$PROGRESS_CHILD" 2>/dev/null; do
    [ ! -t 2 ] || progress_draw "$step" "$text" $((SECONDS - started)) "$counter" "$log"
    sleep 0.25
  done
  wait "$PROGRESS_CHILD" || code=$?
  PROGRESS_CHILD=
  [ ! -t 2 ] || printf '\r\033[K' >&2
  if [ "$code" != 0 ]; then
    echo "[$step] $text: failed with $code after $((SECONDS - started)) s; the end of $log:" >&2
    tail -n 25 "$log" | sed 's/^/  | /' >&2
    return 1
  fi
  echo "[$step] $text: done in $((SECONDS - started)) s" >&2
}

progress_draw() {
  local step=$1 text=$2 elapsed=$3 counter=$4 log=$5 count=0 total=0 bar='' width=24 full
  [ -z "$counter" ] || read -r count total < <("$counter" "$log") || true
  if [ "${total:-0}" -gt 0 ]; then
    [ "$count" -le "$total" ] || count=$total
    full=$((width * count / total))
    printf -v bar '%*s' "$full" ''
    bar=${bar// /#}
    printf -v bar ' [%-*s] %d/%d' "$width" "$bar" "$count" "$total"
    bar=" ${bar# }"
  fi
  printf '\r\033[K[%s] %s%s  %d:%02d' "$step" "$text" "$bar" $((elapsed / 60)) $((elapsed % 60)) >&2
}
