# Sourced by bin/fsl-node, bin/test and bin/netlab. Sets $root and $venv.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${FSL_VENV:-$root/.venv}"

# fsl_bootstrap [EXTRA...]: makes the environment and installs what is missing in it: fsl-async with
# the extras given here, and those of FSL_EXTRAS (hf,plot). They are kept from then on.
# Packages are installed again when pyproject.toml or constraints.txt change, the native codec is
# built again when pyproject.toml or its sources do. Needs Python 3.11+; PYTHON=... chooses one.
fsl_bootstrap() {
    local stamp="$venv/.fsl-installed" built pinned extra
    local is_built='' are_pinned='' extras='' lacking='' requirements python="$venv/bin/python"
    local wanted="$* ${FSL_EXTRAS:-}"
    wanted="${wanted//,/ }"
    built="$({
        cat "$root/pyproject.toml" "$root/codecs/native/CMakeLists.txt"
        find "$root/codecs/native/src" -type f -print0 | LC_ALL=C sort -z | xargs -0 cat
    } | cksum)"
    pinned="$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)"
    if fsl_is_complete; then return 0; fi
    if [ -n "${_FSL_NODE_COMPLETE:-}" ]; then exit 0; fi  # a shell completes: install nothing
    exec 9>"$root/.bootstrap.lock"
    if command -v flock >/dev/null 2>&1; then flock 9; fi
    if fsl_is_complete; then exec 9>&-; return 0; fi

    if [ -n "${PYTHON:-}" ] || [ ! -x "$python" ]; then fsl_find_python || return 2; fi
    # shellcheck disable=SC2086 - names of extras are words
    requirements="$(fsl_requirements "$python" "$lacking" $extras)" || return 2
    if [ ! -f "$stamp" ]; then
        echo "fsl-async: first use, installing into $venv (one to two minutes)" >&2
    else
        echo "fsl-async: bringing $venv up to date${lacking:+, with$lacking}" >&2
    fi
    if [ "$python" != "$venv/bin/python" ]; then
        "$python" -m venv "$venv" ||
            { echo "cannot make $venv with $python -m venv" >&2; return 2; }
        python="$venv/bin/python"
    fi
    # As after Ctrl-C in the first seconds, or before the system had ensurepip (python3-venv).
    local has_pip=("$python" -m pip --version)
    if ! "${has_pip[@]}" >/dev/null 2>&1 &&
        ! { "$python" -m ensurepip --upgrade --default-pip && "${has_pip[@]}"; } >/dev/null; then
        echo "$venv has no pip; remove that folder and start again" >&2
        return 2
    fi
    local pip=("$python" -m pip install --quiet --disable-pip-version-check --no-compile)
    # The codec is built while pip unpacks the other packages.
    local building=''
    if [ "$is_built" != "$built" ]; then
        "${pip[@]}" --no-deps -e "$root" >&2 &
        building=$!
    fi
    local code=0
    if [ "$are_pinned" != "$pinned" ] || [ -n "$lacking" ]; then
        echo "$requirements" >"$venv/.fsl-requirements"
        # pip compiles its thousands of files to bytecode one after another; compileall takes all
        # cores. Some packages hold files that are no Python.
        if "${pip[@]}" -c "$root/constraints.txt" -r "$venv/.fsl-requirements" >&2; then
            "$python" -m compileall -qq -j 0 -x "$fsl_rare" "$venv/lib" >/dev/null 2>&1 || true
        else
            code=2
        fi
    fi
    if [ -n "$building" ]; then wait "$building" || code=$?; fi
    if [ "$code" != 0 ]; then
        echo "pip install failed; the lines above say why" >&2
        return 2
    fi
    printf '%s\n' "$built" "$pinned" "$extras$lacking" >"$stamp.part"
    mv "$stamp.part" "$stamp"
    exec 9>&-
}
# Files that few programs import; Python compiles them when they do.
fsl_rare='/(tests|pip|setuptools|networkx|pygments/lexers|torch/(_inductor|testing)|'
fsl_rare+='transformers/models)/'

# Reads the stamp into is_built, are_pinned and extras; `lacking` gets the extras that are missing.
fsl_is_complete() {
    is_built='' are_pinned='' extras='' lacking=''
    if [ -f "$stamp" ]; then
        { read -r is_built; read -r are_pinned; read -r extras; } <"$stamp" || true
    fi
    for extra in $wanted; do
        case " $extras $lacking " in *" $extra "*) ;; *) lacking="$lacking $extra" ;; esac
    done
    [ "$is_built" = "$built" ] && [ "$are_pinned" = "$pinned" ] && [ -z "$lacking" ]
}

# Sets $python to PYTHON, or to a Python of the system that is new enough.
fsl_find_python() {
    local candidate
    python="${PYTHON:-}"
    if [ -n "$python" ]; then return 0; fi
    for candidate in python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python="$candidate"
            return 0
        fi
    done
    echo "fsl-async needs Python 3.11 or newer; install one or set PYTHON=/path/to/python3" >&2
    return 2
}

# fsl_requirements PYTHON "ASKED..." KEPT...: prints what pyproject.toml requires with these extras.
# A kept one that this version does not have is left out.
fsl_requirements() {
    "$1" - "$root/pyproject.toml" "${@:2}" <<'EOF'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
extras, lines, asked = project["optional-dependencies"], project["dependencies"], sys.argv[2].split()
names = [*asked, *(name for name in sys.argv[3:] if name in extras and name not in asked)]
for name in names:  # an extra may name others
    if name not in extras:
        sys.exit(f"FSL_EXTRAS: no extra {name!r}; there are {', '.join(extras)}")
    for line in extras[name]:
        if line.startswith("fsl-async["):
            more = line.removeprefix("fsl-async[").rstrip("]").split(",")
            names += [one for one in more if one not in names]
        else:
            lines.append(line)
print("\n".join(lines))
EOF
}
