# Sourced by quickstart.sh and test.sh: makes sure that the virtual environment exists and matches the project.
#
#   ensure_environment EXTRAS...    installs the project with these extras into $VENV, quietly
#
# REPLAYSSM_VENV  where the environment lives   (default: .venv in the project)
# PYTHON          interpreter that creates it   (default: python3; 3.10 to 3.13)

VENV="${REPLAYSSM_VENV:-$PWD/.venv}"

# Idle OpenMP threads that spin take the processor from those that work wherever cores are shared.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

fail() {
    echo "error: $*" >&2
    exit 1
}

ensure_environment() {
    local extras stamp log
    extras="$(IFS=,; echo "$*")"
    stamp="$extras $(cat pyproject.toml constraints.txt | cksum)"
    if [ -x "$VENV/bin/python" ] && [ "$(cat "$VENV/.replayssm-$extras" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    local python="${PYTHON:-python3}"
    command -v "$python" >/dev/null || fail "$python was not found: install Python 3.10 to 3.13 or set PYTHON"
    "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' ||
        fail "$python is $("$python" -V 2>&1), but Python 3.10 to 3.13 is needed: set PYTHON to another interpreter"
    echo "Installing into ${VENV#"$PWD"/} (once; a few minutes)" >&2
    log="$(mktemp)"
    if [ ! -x "$VENV/bin/python" ]; then
        "$python" -m venv "$VENV" >"$log" 2>&1 ||
            { cat "$log" >&2; fail "$python could not create a virtual environment (Debian: install python3-venv)"; }
    fi
    if ! "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable ".[$extras]" >"$log" 2>&1; then
        cat "$log" >&2
        fail "the installation failed; the output above says why"
    fi
    rm -f "$log"
    echo "$stamp" >"$VENV/.replayssm-$extras"
}
