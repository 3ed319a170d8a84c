import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from each import for_each
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.cluster.config import ClusterConfig, Config, ConfigError, RedisConfig
from baton.cluster.config_layers import FOREIGN_ENV, MASK, Key, dump, keys, load, mask_password, schema
from baton.engine.options import EngineOptions

SECRET = "0123456789abcdef"
# A legal value, other than the default, for each key whose default does not suggest one.
LEGAL = {
    "router.degrade": "[speculation, max_tokens=100]",
    "prefill.placement": "pack",
    "decode.placement": "strict-spread",
    "planner.interval_s": "20",
    "planner.release": "models/baton",
    "router.port": "9000",
    "router.admin_port": "9001",
    "cluster.name": "other",
    "cluster.key": SECRET,
    "cluster.host": "10.0.0.1",
    "model.path": "models/x",
    "model.dtype": "bfloat16",
    "model.max_model_len": "2048",
    "engine.kind": "vllm",
    "engine.vllm": '{"enforce_eager": true, "swap": [1, 2]}',
    "engine.staging_mib": "64",
    "engine.kv_memory_mib": "64",
    "engine.kv_memory_fraction": "0.5",
    "engine.block_size": "32",
    "engine.max_num_seqs": "32",
    "engine.speculation_batch_tokens": "32",
    "engine.max_num_batched_tokens": "1024",
    "engine.threads": "2",
    "engine.device": "cuda",
    "prefill.gpus": "0.5",
    "decode.gpus": "2.0",
    "engine.attention_backend": "triton",
    "engine.weight_dtype": "int8",
    "engine.kv_dtype": "int8",
    "engine.products": "onednn",
    "kv.transport": "nixl",
    "model.generation_config": "baton",
    "model.tool_format": "hermes",
    "model.reasoning_format": "think",
    "router.reasoning_field": "reasoning",
    "kv.on_failure": "fail",
    "kv.live": "false",
    "kv.ucx_tls": "tcp",
    "kv.ucx_net_devices": "eth0",
    "kv.port": "20100",
    "kv.ucx_port_range": "20000-20099",
    "kv.events": "tcp://127.0.0.1:5557",
    "kv.events_replay": "tcp://127.0.0.1:5558",
    "engine.batching": "static",
    "engine.speculation": "prompt_lookup",
    "engine.predictions": "false",
    "engine.draft_model": "models/y",
    "engine.draft_dtype": "int4",
    "router.overload": "lifo",
    "router.connection_age_s": "300",
    "router.reflection": "true",
    "prefill.port": "9101",
    "decode.port": "9102",
    "telemetry.metrics_port": "9103",
    "router.cors_origins": "['https://app.example']",
    "prefill.replicas": "0",
    "prefill.cores": "[0, 1]",
    "decode.cores": "[1]",
    "redis.url": "redis://10.0.0.2:6379/1",
    "launcher.kind": "ray",
    "telemetry.health_port": "9104",
    "telemetry.log_level": "debug",
    "telemetry.log_format": "json",
    "telemetry.otlp_endpoint": "http://127.0.0.1:4317",
    "security.requests_per_minute": "60",
    "security.tokens_per_minute": "1000",
    "slo.ttft_s": "0.5",
    "slo.tpot_s": "0.05",
    "slo.e2e_s": "10",
    "tiers.memory_mib": "64",
    "tiers.disk_mib": "64",
    "tiers.object": "s3://bucket/kv",
    "tiers.object_mib": "64",
    "tiers.object_endpoint": "http://127.0.0.1:9000",
    "tiers.long_contexts": "1",
    "tiers.save": "at_once",
    "tiers.keep": "all",
    "tiers.save_mib_per_s": "100",
}


def file(folder: Path, text: str, name: str = "baton.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def at(config: Config, name: str) -> object:
    section, leaf = name.split(".")
    return getattr(getattr(config, section), leaf)


def legal(key: Key) -> str:
    if key.name in LEGAL:
        return LEGAL[key.name]
    match key.default:
        case bool(default):
            return "false" if default else "true"
        case int(default):
            return str(default + 1)
        case float(default):
            return str(default * 0.9 or 0.5)
    return "text"


def refused(**layers: Any) -> str:
    layers.setdefault("env", {})
    with pytest.raises(ConfigError) as error:
        load(**layers)
    return str(error.value)


class TestPrecedence:
    def test_defaults_alone(self) -> None:
        loaded = load(env={})
        assert loaded.config == Config()
        assert set(loaded.sources.values()) == {"default"}
        assert list(loaded.sources) == [key.name for key in keys()]

    def test_flag_over_env_over_file_over_default(self, tmp_path: Path) -> None:
        path = file(tmp_path, "engine: {block_size: 2, max_queue: 2, max_num_seqs: 2}")
        env = {"BATON_ENGINE_BLOCK_SIZE": "3", "BATON_ENGINE_MAX_QUEUE": "3"}
        loaded = load([path], env, {"engine.block-size": "4"})
        engine = loaded.config.engine
        assert (engine.block_size, engine.max_queue, engine.max_num_seqs, engine.max_num_batched_tokens) == (4, 3, 2, None)
        assert loaded.sources["engine.block_size"] == "flag --engine.block-size"
        assert loaded.sources["engine.max_queue"] == "env BATON_ENGINE_MAX_QUEUE"
        assert loaded.sources["engine.max_num_seqs"] == f"file {path}"
        assert loaded.sources["engine.max_num_batched_tokens"] == "default"

    def test_a_later_file_wins(self, tmp_path: Path) -> None:
        first, second = file(tmp_path, "router: {port: 1, admin_port: 2}", "a.yaml"), file(tmp_path, "router: {port: 3}", "b.yaml")
        loaded = load([first, second], {})
        assert (loaded.config.router.port, loaded.config.router.admin_port) == (3, 2)
        assert loaded.sources["router.port"] == f"file {second}"

    def test_the_process_environment_is_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in os.environ if name.startswith("BATON_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("BATON_ROUTER_PORT", "9000")
        assert load().config.router.port == 9000


class TestEveryKey:
    @for_each(keys(), lambda key: key.name)
    def test_a_key_can_be_set_by_its_variable_or_its_flag(self, key: Key) -> None:
        text = legal(key)
        pair = {}  # other settings that the key requires
        if key.name.startswith("security"):
            pair = dict.fromkeys(("BATON_SECURITY_TLS_CERT", "BATON_SECURITY_TLS_KEY", "BATON_SECURITY_API_KEYS"), "x")
        if key.name == "engine.batching":
            pair = {"BATON_PREFILL_REPLICAS": "0"}
        if key.name in ("tiers.disk", "tiers.disk_mib", "tiers.key_file"):
            pair = {"BATON_TIERS_DISK": "kv", "BATON_TIERS_DISK_MIB": "64"}
        if key.name == "tiers.long_contexts":
            pair = {"BATON_TIERS_MEMORY_MIB": "64"}
        if key.name.startswith("tiers.object"):
            pair = {"BATON_TIERS_OBJECT": "s3://kv/a", "BATON_TIERS_OBJECT_MIB": "64"}
        if key.name == "kv.events_replay":
            pair = {"BATON_KV_EVENTS": "tcp://127.0.0.1:5557"}
        by_env = load(env=pair | {key.env: text})
        assert by_env.sources[key.name] == f"env {key.env}"
        value = at(by_env.config, key.name)
        assert value != key.default
        expected = yaml.safe_load(text)
        assert value == (tuple(expected) if isinstance(expected, list) else text if isinstance(value, str) else expected)
        if key.flag is None:
            assert key.name == "cluster.key"
            return
        for flag in (key.flag, key.name):
            by_flag = load(env=pair, flags={flag: text})
            assert by_flag.config == by_env.config
            assert by_flag.sources[key.name] == f"flag --{flag}"

    @for_each(keys(), lambda key: key.name)
    def test_a_key_is_documented_and_its_default_is_legal(self, key: Key) -> None:
        assert len(key.description) > 10 and key.description.endswith(".")
        section, leaf = key.name.split(".")
        model = type(getattr(Config(), section))
        assert getattr(model.model_validate({leaf: key.default}), leaf) == key.default

    @for_each([key for key in keys() if isinstance(key.default, float)], lambda key: key.name)
    def test_a_float_key_is_bounded(self, key: Key) -> None:
        for text in (".nan", ".inf", "-.inf", "-1"):
            assert key.name in refused(env={key.env: text}), text

    def test_each_key_has_its_own_variable(self) -> None:
        names = [key.env for key in keys()]
        assert len(set(names)) == len(names)
        assert all(re.fullmatch(r"BATON_[A-Z0-9_]+", name) for name in names)
        assert not set(names) & set(FOREIGN_ENV)

    def test_every_key_survives_dump_and_load(self, tmp_path: Path) -> None:
        config = load(env={key.env: legal(key) for key in keys()}).config
        assert all(at(config, key.name) != key.default for key in keys())
        again = load([file(tmp_path, dump(config, secrets=True))], {})
        assert again.config == config


def test_static_batching_is_refused_with_separate_prefill_workers() -> None:
    text = refused(env={"BATON_ENGINE_BATCHING": "static"})
    assert text.startswith("config: engine.batching static") and "set prefill.replicas to 0" in text
    assert text.endswith("[engine.batching from env BATON_ENGINE_BATCHING]")


@pytest.mark.parametrize("transport", ["tcp", "cuda_ipc"])
def test_a_transport_that_uses_no_adapter_is_refused_where_rdma_is_asked_for(transport: str) -> None:
    text = refused(env={"BATON_KV_RDMA": "true", "BATON_KV_TRANSPORT": transport})
    assert f"rdma needs transport auto or nixl: {transport} uses no adapter" in text
    assert load(env={"BATON_KV_RDMA": "true"}).config.kv.rdma


class TestUnknownNames:
    def test_an_unknown_key_in_a_file_gets_a_suggestion(self, tmp_path: Path) -> None:
        path = file(tmp_path, "engine: {blok_size: 16}")
        text = refused(files=[path])
        assert "engine.blok_size" in text and str(path) in text and "did you mean engine.block_size?" in text

    def test_a_key_in_the_wrong_section_gets_a_suggestion(self, tmp_path: Path) -> None:
        assert "did you mean redis.url?" in refused(files=[file(tmp_path, "telemetry: {url: x}")])
        assert "did you mean kv.port or router.port?" in refused(files=[file(tmp_path, "launcher: {port: 3}")])

    def test_an_unknown_section_gets_a_suggestion(self, tmp_path: Path) -> None:
        assert "unknown section 'engin'; did you mean engine?" in refused(files=[file(tmp_path, "engin: {}")])

    def test_an_unknown_variable_gets_a_suggestion(self) -> None:
        text = refused(env={"BATON_ENGINE_BLOKC_SIZE": "16"})
        assert "env BATON_ENGINE_BLOKC_SIZE" in text and "did you mean BATON_ENGINE_BLOCK_SIZE?" in text

    def test_an_unknown_flag_gets_a_suggestion(self) -> None:
        text = refused(flags={"engine.block-sise": "16"})
        assert "flag --engine.block-sise" in text and "did you mean engine.block_size?" in text

    def test_a_name_unlike_every_key_gets_no_suggestion(self) -> None:
        text = refused(flags={"zzzzzzzz": "1"})
        assert "zzzzzzzz" in text and "did you mean" not in text

    def test_unrelated_variables_are_ignored(self) -> None:
        others = dict.fromkeys(FOREIGN_ENV, "x") | {"BATON_TEST_ANYTHING": "x", "PATH": "x", "BATONX": "x"}
        assert load(env=others).config == Config()

    def test_kubernetes_service_variables_are_explained(self) -> None:
        assert "enableServiceLinks: false" in refused(env={"BATON_ROUTER_SERVICE_HOST": "10.0.0.1"})

    @given(st.text(st.characters(codec="ascii"), max_size=30))
    def test_only_the_names_of_keys_are_accepted(self, name: str) -> None:
        flags = {key.flag for key in keys()}
        if name.replace("_", "-") not in flags:
            assert refused(flags={name: "1"})


class TestFiles:
    @pytest.mark.parametrize("text", ["", "# nothing\n", "engine:\n", "{}", "---\n"])
    def test_an_empty_file_is_accepted(self, tmp_path: Path, text: str) -> None:
        assert load([file(tmp_path, text)], {}).config == Config()

    @pytest.mark.parametrize(
        ("text", "what"),
        [
            ("[1, 2]", "top level must be a mapping, not list"),
            ("just text", "top level must be a mapping, not str"),
            ("engine: 3", "engine must be a mapping, not int"),
            ("engine: [block_size]", "engine must be a mapping, not list"),
            ("engine: {block_size: 1, block_size: 2}", "key 'block_size' twice"),
            ("engine: {}\nengine: {}", "key 'engine' twice"),
            ("on: {}", "key True is not text"),
            ("? [a]\n: 1", "is not text"),
            ("engine: {block_size: 1", "cannot be read"),
            ("engine: !!python/object/apply:os.system [true]", "cannot be read"),
            ("model: {path: 2001-99-99}", "cannot be read"),
            ("a: " + "[" * 5000, "cannot be read"),
        ],
    )
    def test_a_malformed_file_is_refused(self, tmp_path: Path, text: str, what: str) -> None:
        path = file(tmp_path, text)
        message = refused(files=[path])
        assert what in message and str(path) in message

    def test_a_missing_or_binary_file_is_refused(self, tmp_path: Path) -> None:
        assert "gone.yaml" in refused(files=[tmp_path / "gone.yaml"])
        path = tmp_path / "binary.yaml"
        path.write_bytes(b"\xff\xfe\xfd")
        assert "binary.yaml" in refused(files=[path])

    def test_a_number_in_a_file_may_have_an_exponent(self, tmp_path: Path) -> None:
        assert load([file(tmp_path, "redis: {command_timeout_s: 1e-2}")], {}).config.redis.command_timeout_s == 0.01


class TestValues:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("engine.block_size", "0"),
            ("engine.block_size", "true"),
            ("engine.block_size", "16.0"),
            ("engine.block_size", "'16'"),
            ("engine.block_size", "sixteen"),
            ("engine.max_queue", ""),
            ("engine.block_size", "{"),
            ("engine.block_size", "2001-99-99"),
            ("engine.kv_memory_fraction", "1.5"),
            ("engine.kv_memory_fraction", ".nan"),
            ("kv.lease_ttl_s", ".inf"),
            ("engine.prefix_caching", "1"),
            ("model.dtype", "float8"),
            ("router.port", "65536"),
            ("decode.replicas", "0"),
            ("prefill.replicas", "-1"),
            ("redis.url", "http://x"),
            ("redis.url", "redis://"),
            ("cluster.name", "a{b}"),
            ("prefill.cores", "[0, true]"),
            ("prefill.cores", "3"),
        ],
    )
    def test_a_value_of_the_wrong_type_or_range_is_refused(self, name: str, text: str) -> None:
        flag = name.replace("_", "-")
        message = refused(flags={flag: text})
        assert message.startswith(f"{name}") and f"(flag --{flag})" in message
        assert len(message.splitlines()) == 1

    def test_all_errors_are_reported_together_with_value_and_source(self, tmp_path: Path) -> None:
        path = file(tmp_path, "engine: {block_size: -3}\nmodel: {dtype: int3}")
        message = refused(files=[path], env={"BATON_ROUTER_PORT": "tcp://10.0.0.1:8470"})
        assert len(message.splitlines()) == 3
        assert f"engine.block_size = -3 (file {path})" in message
        assert "router.port = 'tcp://10.0.0.1:8470' (env BATON_ROUTER_PORT)" in message

    @pytest.mark.parametrize("text", ["123456", "1e5", "yes", "a: b", "x #y", "@home", "'quoted'", "null!"])
    def test_text_is_kept_verbatim(self, text: str) -> None:
        assert load(env={"BATON_MODEL_PATH": text}).config.model.path == text
        assert load(env={"BATON_CLUSTER_KEY": text * 16}).config.cluster.key == text * 16

    @pytest.mark.parametrize("text", ["", "null"])
    def test_an_optional_key_can_be_unset(self, tmp_path: Path, text: str) -> None:
        path = file(tmp_path, "kv: {ucx_net_devices: eth0}\nengine: {threads: 3}")
        config = load([path], {"BATON_KV_UCX_NET_DEVICES": text, "BATON_ENGINE_THREADS": text}).config
        assert (config.kv.ucx_net_devices, config.engine.threads) == (None, None)

    def test_the_tree_is_frozen(self) -> None:
        config = Config()
        with pytest.raises(ValidationError):
            config.engine.block_size = 1
        with pytest.raises(ValidationError):
            config.engine = EngineOptions()
        assert dataclasses.is_dataclass(keys()[0])


class TestRulesBetweenKeys:
    # A pair that breaks the rule, and the nearest pair that does not.
    @pytest.mark.parametrize(
        ("bad", "good"),
        [
            ({"redis.heartbeat-s": "3"}, {"redis.heartbeat-s": "2.9"}),
            ({"kv.read-timeout-s": "10"}, {"kv.read-timeout-s": "9.9"}),
            ({"kv.lease-ttl-s": "0.2", "kv.read-timeout-s": "0.1"}, {"kv.lease-ttl-s": "0.3", "kv.read-timeout-s": "0.1"}),
            ({"router.default-timeout-s": "601"}, {"router.default-timeout-s": "600"}),
            ({"router.port": "80", "router.admin-port": "80"}, {"router.port": "0", "router.admin-port": "0"}),
            ({"router.admin-port": "80", "router.http-port": "80"}, {"router.admin-port": "80", "router.http-port": "81"}),
            ({"launcher.restart-backoff-s": "31"}, {"launcher.restart-backoff-s": "30"}),
            ({"security.tls-cert": "c"}, {"security.tls-cert": "c", "security.tls-key": "k"}),
            ({"security.tls-key": "k"}, {"security.tls-ca": "a"}),
            ({"decode.cores": "[1, 1]"}, {"decode.cores": "[1, 0]"}),
            ({"decode.cores": "[]"}, {"decode.cores": "[0]"}),
            ({"decode.cores": "[-1]"}, {"decode.cores": "[3]"}),
            ({"tiers.long-contexts": "1"}, {"tiers.long-contexts": "1", "tiers.memory-mib": "64"}),
            ({"tiers.disk": "kv"}, {"tiers.disk": "kv", "tiers.disk-mib": "64"}),
            ({"tiers.disk-mib": "64"}, {"tiers.memory-mib": "64"}),
            ({"tiers.object": "s3://b/kv"}, {"tiers.object": "s3://b/kv", "tiers.object-mib": "64"}),
            (
                {"tiers.object": "file:///kv", "tiers.object-mib": "64", "tiers.object-endpoint": "http://h:1"},
                {"tiers.object": "s3://b", "tiers.object-mib": "64", "tiers.object-endpoint": "http://h:1"},
            ),
            ({"tiers.key-file": "k"}, {"tiers.key-file": "k", "tiers.disk": "kv", "tiers.disk-mib": "64"}),
        ],
    )
    def test_a_broken_rule_names_its_keys_and_their_sources(self, bad: dict[str, str], good: dict[str, str]) -> None:
        message = refused(flags=bad)
        for flag in bad:
            assert flag.split(".")[1].replace("-", "_") in message
            assert f"flag --{flag}" in message
        assert load(env={}, flags=good).config != Config()


class TestSecrets:
    URL = "redis://user:hunter2hunter2@10.0.0.1:6379/0"

    def test_secrets_are_masked_in_a_dump_by_default(self) -> None:
        config = Config(cluster=ClusterConfig(key=SECRET), redis=RedisConfig(url=self.URL))
        masked, plain = dump(config), dump(config, secrets=True)
        assert SECRET not in masked and "hunter2" not in masked and MASK in masked and "10.0.0.1:6379" in masked
        assert SECRET in plain and self.URL in plain

    def test_secrets_appear_in_no_repr_and_no_error(self) -> None:
        config = Config(cluster=ClusterConfig(key=SECRET), redis=RedisConfig(url=self.URL))
        assert SECRET not in repr(config) and "hunter2" not in repr(config) and SECRET not in str(config)
        assert "tooshort" not in refused(env={"BATON_CLUSTER_KEY": "tooshort"})
        assert "hunter2" not in refused(env={"BATON_REDIS_URL": self.URL.replace("redis", "http")})
        text = refused(flags={"tiers.object": "s3://me:hunter2@b/kv", "tiers.object-mib": "64"})
        assert "tiers.object" in text and "credentials come from the environment" in text and "hunter2" not in text
        with pytest.raises(ValidationError) as error:
            ClusterConfig(key="tooshort")
        assert "tooshort" not in str(error.value)

    def test_a_secret_cannot_be_a_flag(self) -> None:
        message = refused(flags={"cluster.key": SECRET})
        assert SECRET not in message and "BATON_CLUSTER_KEY" in message

    @pytest.mark.parametrize(
        ("url", "masked"),
        [
            ("redis://:pw@h:1", f"redis://:{MASK}@h:1"),
            ("rediss://u:pw@h", f"rediss://u:{MASK}@h"),
            ("redis://h:6379/0", "redis://h:6379/0"),
            ("unix:///run/redis.sock", "unix:///run/redis.sock"),
            ("redis://h?password=pw", f"redis://h?password={MASK}"),
            ("unix:///s?db=0&password=pw", f"unix:///s?db=0&password={MASK}"),
            ("redis://[", MASK),
        ],
    )
    def test_the_password_of_a_url_is_masked(self, url: str, masked: str) -> None:
        assert mask_password(url) == masked


def test_the_schema_accepts_the_defaults_and_refuses_invalid_values() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    tree = yaml.safe_load(dump(Config()))
    jsonschema.validate(tree, schema())
    breaches: tuple[dict[str, Any], ...]
    breaches = ({"engine": {"block_size": 0}}, {"engine": {"blok_size": 1}}, {"engin": {}}, {"decode": {"replicas": 0}})
    for breach in breaches:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(breach, schema())
