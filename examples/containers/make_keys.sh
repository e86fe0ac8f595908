#!/bin/sh
# Makes the keys of a run in one place, for tries on machines of your own: in DIR a folder of keys
# for the parameter server (ps) and for each client, which it trusts, and the address with its key.
#     make_keys.sh DIR HOST:PORT NAME...
# Between institutions each site makes its own key and sends the public part (README.md, "Three
# machines"). Keys that are there stay.
set -eu
dir=$1 server=$2
shift 2
mkdir -p "$dir"
for name in ps "$@"; do
    [ -e "$dir/$name/node.key" ] || fsl-node keys new --keys "$dir/$name" >/dev/null
done
for name in "$@"; do
    fsl-node keys trust "$(fsl-node keys pub --keys "$dir/$name")" \
        --name "$name" --names "$name" --keys "$dir/ps"
done
quote='import sys, urllib.parse as u; print(u.urlencode({"key": sys.argv[1]}))'
query=$(python3 -c "$quote" "$(fsl-node keys pub --keys "$dir/ps")")
echo "fsl://$server?$query" >"$dir/address"
