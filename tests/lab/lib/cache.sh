# shellcheck shell=bash
# SPDX-License-Identifier: LGPL-2.1-or-later
# Where built things are kept, and who may touch them when. Sourced by bash.

cache_root() {
  printf '%s\n' "${VGPU_LIBVIRT_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/vgpu-libvirt}"
}

# key_of TEXT FILE...: a short name for exactly this text and these files
key_of() {
  local text=$1 file
  shift
  {
    printf '%s\n' "$text"
    for file in "$@"; do
      printf '%s %s\n' "${file##*/}" "$(sha256sum <"$file")"
    done
  } | sha256sum | cut -c1-12
}

# lock_alone FILE SECONDS: one builder at a time; the lock ends with the process and its children
lock_alone() {
  local file=$1 limit=$2
  exec {CACHE_LOCK}>>"$file"
  flock --nonblock "$CACHE_LOCK" && return
  echo "waiting for another build, at most $limit s ($file)" >&2
  flock --timeout "$limit" "$CACHE_LOCK" && return
  echo "another build still holds $file after $limit s" >&2
  return 1
}

# lock_in_use DIR: keeps DIR from being pruned for as long as this process or its children live
lock_in_use() {
  local fd
  exec {fd}<"$1"
  flock --shared --nonblock "$fd"
}

# discard DIR: removes it, unless a killed build's mounts below it could take other folders along
discard() {
  local dir=$1 mount
  [ -e "$dir" ] || return 0
  while read -r mount; do
    umount -- "$mount" || return 1
  done < <(cut -d' ' -f5 /proc/self/mountinfo | grep -F -- "$(realpath -- "$dir")/" | sort -r)
  rm -rf --one-file-system -- "$dir"
}

# prune_old KEEP DIR...: removes all but the KEEP last used, and never one in use
prune_old() {
  local keep=$1 dir fd
  shift
  while read -r dir; do
    [ -d "$dir" ] || continue
    exec {fd}<"$dir"
    if flock --nonblock "$fd"; then discard "$dir" || true; fi
    exec {fd}<&-
  done < <(stat --format '%Y %n' -- "$@" 2>/dev/null | sort -rn | cut -d' ' -f2- | tail -n "+$((keep + 1))")
}
