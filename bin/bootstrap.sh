# Sourced by bin/fsl-node and bin/test: makes .venv once, and again when pyproject.toml,
# constraints.txt or the native codec's sources change. Sets $root and $venv. Needs Python 3.11+;
# pick one with PYTHON=...
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${FSL_VENV:-$root/.venv}"

fsl_bootstrap() {
    local python="${PYTHON:-}" candidate stamp wanted
    wanted="$({
        cat "$root/pyproject.toml" "$root/constraints.txt" "$root/codecs/native/CMakeLists.txt"
        find "$root/codecs/native/src" -type f -print0 | LC_ALL=C sort -z | xargs -0 cat
    } | cksum)"
    stamp="$venv/.fsl-installed"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return 0; fi
    exec 9>"$root/.bootstrap.lock"
    if command -v flock >/dev/null 2>&1; then flock 9; fi
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exec 9>&-; return 0; fi
    if [ -z "$python" ]; then
        for candidate in python3 python3.13 python3.12 python3.11; do
            if command -v "$candidate" >/dev/null 2>&1 &&
                "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
                python="$candidate"; break
            fi
        done
    fi
    if [ -z "$python" ]; then
        echo "fsl-async needs Python 3.11 or newer; install one or set PYTHON=/path/to/python3" >&2
        return 2
    fi
    echo "fsl-async: first use, installing into $venv (a few minutes)" >&2
    "$python" -m venv "$venv" || { echo "cannot make $venv with $python -m venv" >&2; return 2; }
    # pip compiles its 12,000 files to bytecode one after another; compileall takes all cores. Left
    # out are those that few programs import; Python compiles them then. Some packages hold files
    # that are no Python.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
        -c "$root/constraints.txt" -e "$root[dev,live]" >&2 ||
        { echo "pip install failed; the lines above say why" >&2; return 2; }
    "$venv/bin/python" -m compileall -qq -j 0 -x '/(tests|pip|transformers/models)/' \
        "$venv/lib" >/dev/null 2>&1 || true
    echo "$wanted" >"$stamp"
    exec 9>&-
}
