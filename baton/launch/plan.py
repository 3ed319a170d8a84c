"""Turns a configuration into what a launcher runs: completes it, checks it before anything starts, and makes the template of each role.

The configuration is passed on as environment variables, so a process on any node gets all of it.
"""

import errno
import itertools
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from baton.cluster.address import address_towards, advertised, is_loopback, target
from baton.cluster.config import EVERYWHERE, PORTS, Config, ConfigError
from baton.cluster.config_layers import keys, to_env
from baton.cluster.packages import command
from baton.cluster.records import ROLES
from baton.launch import state
from baton.launch.launcher import Launcher, RestartRule, Template
from baton.launch.local_launcher import LocalLauncher
from baton.launch.placing import Gpus
from baton.launch.ports import Ports

DOORS = ("port", "admin_port", "http_port", "page_port")  # of the router; they stay the same when it is restarted
NEEDED = ("config.json", "tokenizer.json")  # of a model's folder; what else it needs depends on the model
LOOPBACK = "127.0.0.1"
ANYWHERE = ("192.0.2.1", 9)  # an address of no host (RFC 5737), so the way to it is the default route; nothing is sent
GRACE_S = 15.0  # on top of the drain, for closing


class UpError(state.StateError):
    """The cluster cannot start; the text says what to change or to look at."""


def complete(config: Config, redis_url: str, ports: Ports) -> Config:
    """Fills in what is only known when a cluster starts: its key, the registry's address, and the router's ports."""
    router = config.router
    doors = {name: hold(config, ports, getattr(router, name)) for name in DOORS}
    return config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update={"key": config.cluster.key or secrets.token_hex(32)}),
            "redis": config.redis.model_copy(update={"url": redis_url}),
            "router": router.model_copy(update=doors),
        }
    )


def redis_host(config: Config) -> str:
    """Where an embedded Redis listens: on loopback, or if the cluster listens for other hosts, where these reach this one."""
    cluster = config.cluster
    if is_loopback(cluster.host):
        return LOOPBACK
    if cluster.advertise == "auto" and cluster.host in EVERYWHERE:
        with suppress(OSError):
            return address_towards(*ANYWHERE)
    return str(socket.getaddrinfo(advertised(config), None)[0][4][0])


def hold(config: Config, ports: Ports, port: int = 0) -> int:
    """`port`, or for 0 any free one that the configuration gives to no process. Raises UpError."""
    taken = {config.at(name) for names in PORTS.values() for name in names}
    try:
        while (held := ports.hold(port)) in taken and not port:
            pass
    except OSError as error:
        raise UpError(f"router: cannot listen on {target(config.cluster.host, port)} ({error.strerror})") from None
    return held


def check_launcher(config: Config) -> None:
    """Raises ConfigError: `baton up` starts nothing on Kubernetes."""
    if config.launcher.kind == "kubernetes":
        raise ConfigError("launcher.kind kubernetes: `baton up` starts nothing there: `helm install NAME deploy/helm/baton`")


def check_ports(config: Config) -> None:
    """Raises UpError if two processes on this host would share a port, or if another process already listens on one of their ports."""
    names = set(PORTS["router"])
    if config.launcher.kind == "local":
        check_shared_ports(config)
        names.update(*(PORTS[role] for role in ROLES if getattr(config, role).replicas))
    for name in sorted(names):
        if (port := config.at(name)) is None:
            continue
        try:
            with Ports(config.cluster.host) as ports:
                ports.hold(port)
        except OSError as error:
            where, flag = target(config.cluster.host, port), f"--{name.replace('_', '-')}"
            if error.errno == errno.EADDRNOTAVAIL:
                raise UpError(f"cluster.host: {config.cluster.host} is not an address of this machine (is its interface up?)") from None
            raise UpError(f"{name}: cannot listen on {where} ({error.strerror}); choose another with {flag}") from None


def check_shared_ports(config: Config, routers: int = 1) -> None:
    """Raises UpError: all processes of a local cluster run on one host, so a fixed port has room for one of them."""
    counts = {"router": routers, "prefill": config.prefill.replicas, "decode": config.decode.replicas}
    users = [(name, role) for role, names in PORTS.items() for name in names if config.at(name) for _ in range(counts[role])]
    for (first, one), (second, other) in itertools.combinations(users, 2):
        if config.at(first) == config.at(second):
            who = f"{first} and {second}" if first != second else f"{first}: two workers ({one}, {other})"
            raise UpError(f"{who} would share port {config.at(first)} of this host; 0 means any free port")


def check_model(config: Config) -> None:
    """Raises UpError if the folder cannot contain a model. Skipped if Ray may run the processes on other hosts."""
    if config.launcher.ray_address is not None:
        return
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise UpError(f"model.path: {folder} is not a folder" if folder.exists() else f"model.path: there is no folder {folder}")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UpError(f"model.path: {folder} cannot be read by this user")
    if missing := [name for name in NEEDED if not (folder / name).is_file()]:
        raise UpError(f"model.path: {folder} holds no {' and no '.join(missing)}")
    if closed := [file.name for file in sorted(folder.iterdir()) if not os.access(file, os.R_OK)]:
        raise UpError(f"model.path: {folder / closed[0]} cannot be read by this user")


def make_launcher(config: Config, log_dir: Path, gpus: Gpus | None = None) -> Launcher:
    """`gpus`: of this host, for its processes. Raises ConfigError."""
    check_launcher(config)
    rule = RestartRule(config.launcher.restart_backoff_s, config.launcher.restart_backoff_max_s, hang_s=config.launcher.hang_s)
    if config.launcher.kind == "local":
        return LocalLauncher(rule, log_dir, gpus)
    # Ray is loaded only here, so that a local cluster starts without it.
    from baton.launch.ray_launcher import RayLauncher

    needed = 1 + sum(pool.cpus * pool.replicas for pool in (config.prefill, config.decode))
    own = None if config.launcher.ray_address else max(int(needed) + 2, 4)
    return RayLauncher(config.launcher.ray_address, rule, log_dir, ray_num_cpus=own, gpus=gpus)


def templates(config: Config, ports: Ports, label: str = "") -> list[tuple[Template, int]]:
    """Routers and pools, each with the number of its processes. `label`: of a host that joins; it gets no router.

    Raises UpError."""
    env = MappingProxyType({**to_env(config), **log_format(config)})
    grace_s = config.router.drain_s + GRACE_S
    made = [
        (
            Template("router", command("router"), env, cpus=0.0, grace_s=grace_s, env_each=router_ports(config, ports), leads=True),
            config.router.replicas,
        )
    ]
    if config.planner.enabled:
        # It ends with the routers, before the workers: nothing is to be planned for a cluster that stops.
        own = {name: value for name, value in env.items() if name != "BATON_TELEMETRY_HEALTH_PORT"}
        own["BATON_TELEMETRY_WORKER_METRICS_PORT"] = "0"  # a fixed one is a worker's
        made.append((Template("planner", command("baton.planner"), own, cpus=0.0, leads=True), 1))
    if label:
        made.clear()
    for role in ROLES:
        pool = getattr(config, role)
        argv = command(f"{role}_worker")
        template = Template(
            role,
            argv,
            env,
            pool.cpus,
            0.0 if pool.gpus == "auto" else pool.gpus,  # not auto any more where a GPU is used (`baton.launch.gpus`)
            pool.placement,
            pool.cores,
            config.engine.threads,
            pool.drain_s + GRACE_S,
            stem=f"{role}-{label}" if label else "",
        )
        made.append((template, pool.replicas))
    return made


def router_ports(config: Config, ports: Ports) -> tuple[dict[str, str], ...]:
    """The variables that set the ports of each router. They stay the same when it is restarted, so that clients find it again."""
    keys_of = {key.name: key.env for key in keys()}
    made: list[dict[str, str]] = [{}]
    for _ in range(1, config.router.replicas):
        own = {}
        for name in PORTS["router"]:
            if config.at(name):  # any free one, or none, can be everyone's
                own[keys_of[name]] = str(hold(config, ports))
        made.append(own)
    return tuple(made)


def log_format(config: Config) -> dict[str, str]:
    """People read the logs of a cluster that a launcher started; its processes have no terminal from which they could tell."""
    return {"BATON_TELEMETRY_LOG_FORMAT": "text"} if config.telemetry.log_format == "auto" else {}
