# shellcheck shell=bash
# SPDX-License-Identifier: GPL-2.0-or-later
#
# Shared by the bash scripts of this repository: messages, packages of the
# distribution, the private Python environment, source packages, ccache.
# Sourced, never run.  Leaves to others: what is built from all that.

# Exit codes the scripts agree on: 1 failed, 2 wrong usage, 3 the machine
# lacks something (package, right, kernel feature).
EXIT_USAGE=2
EXIT_LACKING=3
export EXIT_USAGE EXIT_LACKING

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# Everything worth keeping between checkouts.  Deleting it costs time only.
# systemd gives root's services no HOME.
cache=${QEMU_KSM_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/qemu-ksm}
export top cache

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "$*"; exit 1; }
lacking() { say "$*"; exit "$EXIT_LACKING"; }
usage_error() { say "$*"; say "try '${0##*/} --help'"; exit "$EXIT_USAGE"; }

# have_pkg NAME: is the Debian package installed?
have_pkg() {
    dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null | grep -qx installed
}

# need_cache: makes its directory.
need_cache() {
    mkdir -p "$cache" 2>/dev/null ||
        lacking "cannot make the directory $cache; name another in QEMU_KSM_CACHE"
}

# need_apt PACKAGE...: installs what is missing when root; otherwise prints
# the one command that would, and exits 3.
need_apt() {
    local pkg missing=()
    for pkg; do
        have_pkg "$pkg" || missing+=("$pkg")
    done
    [ ${#missing[@]} -eq 0 ] && return 0
    if [ "$(id -u)" -ne 0 ]; then
        lacking "packages are missing; run: sudo apt-get install -y --no-install-recommends ${missing[*]}"
    fi
    say "installing ${missing[*]}"
    need_cache
    (
        # two of our scripts may run at once; apt does not wait by itself
        flock 9
        export DEBIAN_FRONTEND=noninteractive
        local opts=(-q -y --no-install-recommends -o DPkg::Lock::Timeout=600
                    -o Acquire::Retries=3)
        # a new machine has no lists, an old one stale lists
        apt-get "${opts[@]}" install "${missing[@]}" ||
            { apt-get -q -o Acquire::Retries=3 update || true
              apt-get "${opts[@]}" install "${missing[@]}"; }
    ) 9>"$cache/apt.lock" >"$cache/apt.log" 2>&1 </dev/null || {
        tail -n 20 "$cache/apt.log" >&2
        die "apt-get could not install: ${missing[*]} (whole log: $cache/apt.log)"
    }
}

# need_venv: puts a private Python environment with scripts/lib/requirements.txt
# first in PATH; made once per content of that file.
need_venv() {
    local req=$top/scripts/lib/requirements.txt key dir
    need_apt python3 python3-venv
    key=$(sha256sum "$req" | cut -c1-12)
    dir=$cache/venv-$key
    need_cache
    if [ ! -e "$dir/.complete" ]; then
        (
            flock 9
            [ -e "$dir/.complete" ] && exit 0
            say "making a Python environment (once) in $dir"
            rm -rf "$dir"
            /usr/bin/python3 -m venv "$dir" &&
                "$dir/bin/pip" install -q --disable-pip-version-check \
                    --retries 5 -r "$req" &&
                touch "$dir/.complete"
        ) 9>"$cache/venv.lock" >&2 </dev/null ||
            die "could not make the Python environment from $req"
    fi
    VIRTUAL_ENV=$dir
    PATH=$dir/bin:$PATH
    export VIRTUAL_ENV PATH
    unset PYTHONHOME
    hash -r
}

# debian_mirror: prints the address of the mirror in this machine's own sources.
debian_mirror() {
    local mirror
    # apt-get expands these, not the shell
    # shellcheck disable=SC2016
    mirror=$(apt-get indextargets --format '$(SITE) $(ORIGIN) $(LABEL)' 2>/dev/null |
             awk '$2 == "Debian" && $3 == "Debian" { print $1; exit }')
    if [ -z "$mirror" ]; then
        # no lists yet: read the sources themselves, deb822 and one-line
        mirror=$(sed -n -e 's/^URIs:[[:space:]]*\([^[:space:]]*\).*/\1/p' \
                     -e 's/^deb[[:space:]]\(\[[^]]*\][[:space:]]*\)\{0,1\}\([^[:space:]]*\).*/\2/p' \
                     /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null |
                 grep -E '/debian/?$' | head -n 1)
    fi
    [ -n "$mirror" ] || die "no Debian mirror in this machine's apt sources"
    printf '%s\n' "$mirror"
}

# private_apt RELEASE...: a private apt configuration in $cache/apt that knows
# the given Debian releases (binary and source), with the mirror taken from
# this machine's own sources and nothing of the machine changed.  Sets
# PRIVATE_APT, the options for apt-get.  PRIVATE_APT_DIR names another
# directory, for a release whose absence must not stop the others;
# PRIVATE_APT_ARCH an architecture in the place of this machine's (it needs a
# directory of its own).
private_apt() {
    local dir=${PRIVATE_APT_DIR:-$cache/apt} mirror release key
    need_apt dpkg-dev ca-certificates debian-archive-keyring
    mirror=$(debian_mirror) || exit 1
    mkdir -p "$dir/lists/partial" "$dir/archives/partial" "$dir/etc"
    : >"$dir/etc/sources.list.new"
    key=/usr/share/keyrings/debian-archive-keyring.gpg
    for release; do
        printf 'deb [signed-by=%s] %s %s main\ndeb-src [signed-by=%s] %s %s main\n' \
            "$key" "$mirror" "$release" "$key" "$mirror" "$release" \
            >>"$dir/etc/sources.list.new"
    done
    # such a hook of the machine's, as images for containers have, takes away
    # what another apt-get is installing from
    printf '#clear %s;\n' APT::Update::{Pre,Post}-Invoke{,-Success} \
        >"$dir/etc/apt.conf"
    [ -z "${PRIVATE_APT_ARCH-}" ] ||
        printf '#clear APT::Architectures;\n%s "%s";\n' \
            APT::Architecture "$PRIVATE_APT_ARCH" \
            APT::Architectures:: "$PRIVATE_APT_ARCH" >>"$dir/etc/apt.conf"
    PRIVATE_APT=(-q -c "$dir/etc/apt.conf" -o "Dir::Etc::sourcelist=$dir/etc/sources.list"
                 -o Dir::Etc::sourceparts=- -o Dir::Etc::preferencesparts=-
                 -o "Dir::State::lists=$dir/lists"
                 -o "Dir::Cache::archives=$dir/archives"
                 -o "Dir::Cache::pkgcache=" -o "Dir::Cache::srcpkgcache="
                 -o Acquire::Retries=3 -o Acquire::Languages=none
                 -o APT::Sandbox::User=)
    if ! cmp -s "$dir/etc/sources.list.new" "$dir/etc/sources.list" ||
       [ -z "$(find "$dir/.updated" -mtime -2 2>/dev/null)" ]; then
        mv "$dir/etc/sources.list.new" "$dir/etc/sources.list"
        apt-get "${PRIVATE_APT[@]}" update >"$dir/update.log" 2>&1 </dev/null ||
            { cat "$dir/update.log" >&2; die "apt-get update of the private configuration failed"; }
        touch "$dir/.updated"
    fi
}

# all the releases our sources and guests come from, so that every user of
# private_apt shares one set of lists
PRIVATE_RELEASES=(bookworm trixie)

# fetch_source PACKAGE RELEASE: downloads a Debian source package into
# $cache/sources and prints the directory that holds its .dsc and tarballs.
# Fetched once; the progress goes to stderr.
fetch_source() {
    local package=$1 release=$2 dir=$cache/sources/$1-$2
    mkdir -p "$dir"
    (
        flock 9
        [ -e "$dir/.complete" ] && exit 0
        private_apt "${PRIVATE_RELEASES[@]}"
        say "fetching the source of $package ($release)"
        cd "$dir"
        # --only-source and the release: the newest version of that release
        apt-get "${PRIVATE_APT[@]}" source --download-only --only-source \
            "$package/$release" >fetch.log 2>&1 </dev/null ||
            { cat fetch.log >&2; exit 1; }
        touch .complete
    ) 9>"$cache/sources.lock" || die "could not fetch the source of $package from $release"
    printf '%s\n' "$dir"
}

# fetch_pinned NAME FOLDER PINS: the same for a version that releases pass by:
# files of FOLDER in the mirror's pool, into $cache/sources/NAME.  PINS has what
# sha256sum prints for them.
fetch_pinned() {
    local name=$1 folder=$2 pins=$3 dir=$cache/sources/$1 mirror sum file
    mkdir -p "$dir"
    (
        flock 9
        [ "$(cat "$dir/.complete" 2>/dev/null)" = "$pins" ] && exit 0
        need_apt apt ca-certificates
        mirror=$(debian_mirror) || exit 1
        say "fetching the source $name"
        cd "$dir" && rm -f -- * || exit 1
        while read -r sum file; do
            /usr/lib/apt/apt-helper -q -o Acquire::Retries=3 \
                -o APT::Sandbox::User= download-file "${mirror%/}/$folder/$file" \
                "$dir/$file" "SHA256:$sum" >>fetch.log 2>&1 </dev/null ||
                { cat fetch.log >&2; exit 1; }
        done <<<"$pins"
        sha256sum --check --quiet <<<"$pins" >&2 || exit 1
        printf '%s\n' "$pins" >.complete
    ) 9>"$cache/sources.lock" || die "could not fetch the source $name"
    printf '%s\n' "$dir"
}

# The versions of QEMU that are built and tested; the first is the default.
QEMU_VERSIONS=(10.0 10.2)
export QEMU_VERSIONS

# fetch_qemu VERSION: QEMU's source package, as fetch_source has it.
fetch_qemu() {
    case $1 in
    10.0) fetch_source qemu trixie ;;
    10.2) fetch_pinned qemu-10.2.2 pool/main/q/qemu "\
f1684b3aa5ec500c3389d346c6501dee45041ea91656c6556d4da9023b7987dd  qemu_10.2.2+ds-1.dsc
be05230fe47a6937cd29f28f562932c8125f9c93c2a82c625198f7a4aa601dfb  qemu_10.2.2+ds.orig.tar.xz
ddf75aceab4f8f77374f3cb34fc97b41514895aeb293ce8b2ddd5e072bb0f5c0  qemu_10.2.2+ds-1.debian.tar.xz" ;;
    *) die "no source of QEMU $1, only of ${QEMU_VERSIONS[*]}" ;;
    esac
}

# unpack_source PACKAGE DIR: a source package, as fetch_source has it, into DIR,
# unless that version is there.
unpack_source() {
    local dir=$2 dsc want
    dsc=$(echo "$1"/*.dsc)
    want=$(sha256sum <"$dsc")
    [ "$(cat "$dir/.unpacked" 2>/dev/null)" = "$want" ] && return 0
    need_apt dpkg-dev xz-utils
    say "unpacking $(basename "$dsc" .dsc)"
    rm -rf "$dir" "$dir.new"
    mkdir -p "$(dirname "$dir")"
    # it is signed or pinned
    dpkg-source --no-check --no-copy -x "$dsc" "$dir.new" >"$dir.log" 2>&1 ||
        { tail "$dir.log" >&2; die "could not unpack $dsc"; }
    printf '%s\n' "$want" >"$dir.new/.unpacked"
    mv "$dir.new" "$dir"
}

# fetch_unpacked PACKAGE RELEASE: unpacks a Debian package, without those it
# depends on, and prints the directory.  For programs whose packages would start
# services.  Fetched once.
fetch_unpacked() {
    local package=$1 release=$2 dir=$cache/unpacked/$1-$2
    mkdir -p "${dir%/*}"
    (
        flock 9
        [ -e "$dir/.complete" ] && exit 0
        private_apt "${PRIVATE_RELEASES[@]}"
        say "fetching the package $package ($release)"
        rm -rf "$dir"
        mkdir "$dir"
        cd "$dir"
        apt-get "${PRIVATE_APT[@]}" download "$package/$release" \
            >fetch.log 2>&1 </dev/null || { cat fetch.log >&2; exit 1; }
        dpkg-deb -x "$package"_*.deb .
        rm "$package"_*.deb
        touch .complete
    ) 9>"$cache/sources.lock" >&2 || lacking "no package $package of $release"
    printf '%s\n' "$dir"
}

# use_ccache: compilers go through ccache, shared by all checkouts.
use_ccache() {
    need_apt ccache
    export CCACHE_DIR=$cache/ccache CCACHE_BASEDIR=$top CCACHE_NOHASHDIR=1
    export CCACHE_MAXSIZE=${CCACHE_MAXSIZE:-3G} CCACHE_COMPILERCHECK=content
    export CCACHE_SLOPPINESS=time_macros,include_file_ctime,include_file_mtime
    PATH=/usr/lib/ccache:$PATH
    export PATH
}

# run_ninja BUILD LOG TARGET...: compiles; a terminal is shown how far it is.
run_ninja() {
    local build=$1 log=$2 line code
    shift 2
    local command=(nice -n 5 ninja -C "$build" -j "${JOBS:-$(nproc)}" "$@")
    if ! [ -t 2 ]; then
        "${command[@]}" >"$log" 2>&1 </dev/null
        return
    fi
    "${command[@]}" 2>&1 </dev/null | tee "$log" |
        while IFS= read -r line; do
            if [[ $line =~ ^\[[0-9]+/[0-9]+\] ]]; then
                printf '\r%s' "${BASH_REMATCH[0]}" >&2
            fi
        done
    code=${PIPESTATUS[0]}
    printf '\r\033[K' >&2
    return "$code"
}
