# shellcheck shell=bash
# SPDX-License-Identifier: LGPL-2.1-or-later
# The machine that the lab's guest runs on. Sourced by bash.

kernel_version() {
  basename -a "$1"/lib/modules/* | sort -V | tail -n 1
}

# qemu_program ROOTFS PROGRAM: fills the array QEMU with what runs one of QEMU's programs
# The guest's own, through the guest's own loader: the host's may be too old to know igb.
qemu_program() {
  local lib=$1/usr/lib/x86_64-linux-gnu
  QEMU=(env "QEMU_MODULE_DIR=$lib/qemu"
    "$1/lib64/ld-linux-x86-64.so.2" --library-path "$lib" "$1/usr/bin/$2")
}

# qemu_command ROOTFS INITRD DISK SNAPSHOT GPUS MEMORY CPUS [LAST_PORT]: fills the array QEMU
# DISK: raw, or *.qcow2, which is thrown away and so needn't outlive the host
# LAST_PORT: ",PROPERTY=VALUE"... of the last GPU's port
qemu_command() {
  local root=$1 initrd=$2 disk=$3 snapshot=$4 gpus=$5 memory=$6 cpus=$7 last_port=${8:-} format=raw i port=''
  [ "${disk##*.}" != qcow2 ] || format=qcow2,cache=unsafe
  qemu_program "$root" qemu-system-x86_64
  # no_timer_check: on a busy host the kernel would see too few ticks, and panic
  # shellcheck disable=SC2054 # the commas are QEMU's
  QEMU+=(
    -L "$root/usr/share/qemu" -L "$root/usr/share/seabios"
    -machine q35 -accel tcg,thread=multi,tb-size=512 -cpu "max,la57=off" -smp "$cpus" -m "$memory"
    -nodefaults -no-user-config -display none -no-reboot
    -device intel-iommu,intremap=on,caching-mode=on
    -kernel "$root/boot/vmlinuz-$(kernel_version "$root")" -initrd "$initrd"
    -append "console=ttyS0 quiet panic=-1 mitigations=off intel_iommu=on no_timer_check nokaslr apparmor=0"
    -drive "file=${disk//,/,,},if=none,id=disk,format=$format,snapshot=$snapshot"
    -device virtio-blk-pci,drive=disk)
  # physical functions 0000:01:00.0, 0000:02:00.0, ...
  for ((i = 1; i <= gpus; i++)); do
    [ "$i" != "$gpus" ] || port=$last_port
    QEMU+=(-device "pcie-root-port,id=port$i,chassis=$i,slot=$i$port" -device "igb,bus=port$i,id=gpu$i")
  done
}

# qemu_share TAG DIR [readonly]: adds a shared folder to the array QEMU
qemu_share() {
  QEMU+=(-virtfs "local,path=${2//,/,,},mount_tag=$1,security_model=none,multidevs=remap${3:+,readonly=on}")
}

# qemu_network ADDRESS SERVER SOCKET: adds one end of a network of two guests to the array QEMU
# The end with SERVER=on is to be started too; the other waits for it.
qemu_network() {
  local address=$1 server=$2 socket=$3
  local netdev="stream,id=link,server=$server,addr.type=unix,addr.path=${socket//,/,,}"
  [ "$server" = on ] || netdev+=,reconnect-ms=500
  QEMU+=(-netdev "$netdev" -device "virtio-net-pci,netdev=link,mac=52:54:00:00:00:0${address##*.}")
  qemu_append "lab.address=$address"
}

# qemu_append WORD...: adds words to the kernel's command line in the array QEMU
qemu_append() {
  local i
  for i in "${!QEMU[@]}"; do
    [ "${QEMU[i]}" != -append ] || QEMU[i + 1]+=" $*"
  done
}
