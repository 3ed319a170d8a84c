"""The limit of a process's open files, beside what it may have to hold."""

import logging
import resource

log = logging.getLogger(__name__)
OTHER_FILES = 256  # that the process may have open besides those it asks for


def files_for(wanted: int) -> int:
    """How many of `wanted` files leave enough for everything else. Raises the process's soft limit if allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard))
    except (OSError, ValueError):  # more than the system allows, although its limit says otherwise
        log.debug("the limit of open files stays at %d", soft)
    return max(1, min(wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES))
