"""Runs the checks, which compare the expected with the actual state. Each check is independent and has no I/O."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator

from .figures import scaling, scrape
from .findings import Finding, broken, ok, unknown
from .install import Facts, Install
from .serving import dns, models, redis, services
from .workloads import gpus, pods, storage

Check = Callable[[Install, Facts], Iterator[Finding]]
ROLE = "set tests.enabled and tests.diagnose to true and upgrade the release: the chart then gives the tests' ServiceAccount its Role"


def api(install: Install, facts: Facts) -> Iterator[Finding]:
    refused = {plural: answer for plural, answer in facts.objects.items() if not answer.good and answer.status != 404}
    if not refused:
        yield ok("api", f"the API server lists the objects of {install.namespace}")
    for plural, answer in refused.items():
        if not answer.status:
            mend = "a NetworkPolicy must let the tests' pods reach the API server: networkPolicy.apiServer"
            yield broken("api", f"the API server does not respond: {answer.why}", mend)
            return
        yield unknown("api", f"the test may not list {plural}: {answer.why}", ROLE)


def secrets(install: Install, facts: Facts) -> Iterator[Finding]:
    lacking = 0
    for secret in install.secrets:
        name, keys, value = secret["name"], secret["keys"], secret["value"]
        there = facts.secrets.get(name, frozenset())
        missing = [key for key in keys if not fnmatch.filter(there, key)]
        make = f"kubectl -n {install.namespace} create secret generic {name} " + " ".join(
            f"--from-file={key.replace('*', 'keys')}=FILE" for key in keys or ["KEY"]
        )
        if not there:
            lacking += 1
            yield broken("secrets", f"Secret {name}, which {value} names, does not exist or is empty", make)
        elif missing:
            lacking += 1
            what = f"Secret {name} ({value}) has no key {', '.join(missing)}; it has {', '.join(sorted(there))}"
            yield broken("secrets", what, f"add the key, or create the Secret again: {make}")
    if not lacking:
        yield ok("secrets", f"{len(install.secrets)} Secrets exist and have their keys")


CHECKS: tuple[Check, ...] = (api, secrets, dns, services, redis, storage, gpus, pods, models, scrape, scaling)


def diagnose(install: Install, facts: Facts) -> list[Finding]:
    """Returns the findings of all checks. A check that cannot read the facts becomes an UNKNOWN finding; the others still run."""
    found: list[Finding] = []
    for check in CHECKS:
        try:
            found += check(install, facts)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            found.append(unknown(check.__name__, f"the check could not read the responses: {error!r}", "please report it"))
    return found
