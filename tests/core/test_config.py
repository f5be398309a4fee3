from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from oneflare.client.start import statistics_plan
from oneflare.core.config import Experiment
from oneflare.core.layers import SHORT_FORMS, merge, parse_overrides, read_yaml
from oneflare.core.strict import strict_yaml
from oneflare.data import ImageSpec
from oneflare.errors import ConfigError
from oneflare.methods.resolve import resolve
from oneflare.nn import encoder_spec, initial_network


def test_short_forms_reach_their_sections():
    experiment = resolve(
        parse_overrides(["data=svhn", "alpha=0.3", "clients=7", "epochs=9", "seed=4", "encoder=conv4"])
    )
    assert experiment.data.name == "svhn"
    assert (experiment.partition.alpha, experiment.partition.clients) == (0.3, 7)
    assert (experiment.train.epochs, experiment.seed, experiment.encoder["name"]) == (9, 4, "conv4")
    assert set(SHORT_FORMS) == {"alpha", "clients", "epochs"}


def test_later_layers_win_and_recipes_come_first():
    experiment = resolve(
        {"method": "etf_annealed"}, {"controller": {"lambda_0": 7}}, parse_overrides(["train.lr=1e-3"])
    )
    assert experiment.controller["name"] == "annealed"
    assert experiment.controller["lambda_0"] == 7
    assert experiment.train.lr == 1e-3


def test_renaming_a_component_drops_the_options_of_the_old_one():
    experiment = resolve({"method": "flare"}, parse_overrides(["controller=fixed"]))
    assert experiment.controller == {"name": "fixed", "lambda_0": 5.0}
    assert (
        merge({"encoder": {"name": "resnet8", "width": 4}}, {"encoder": {"name": "resnet8"}})["encoder"]["width"] == 4
    )


def test_data_options_survive_naming_the_data():
    assert merge({"data": {"train_size": 9}}, {"data": "svhn"})["data"] == {"train_size": 9, "name": "svhn"}


def test_method_by_the_logs_version_number():
    assert resolve({"method": "V14"}).method == "flare"
    assert resolve({"method": "v4"}).method == "fafi"


def test_yaml_round_trip(tmp_path):
    experiment = resolve({"method": "flare", "partition.alpha": 0.3})
    path = tmp_path / "experiment.yaml"
    path.write_text(experiment.to_yaml())
    again = resolve(read_yaml(path))
    assert again == experiment
    assert again.training_digest() == experiment.training_digest()


def test_an_option_that_is_absent_leaves_the_digest_alone():
    plain = Experiment()
    content = plain.model_dump(mode="json")
    assert content["data"]["image_size"] is None
    assert Experiment.model_validate(content).training_digest() == plain.training_digest()
    assert Experiment(data={"name": "digits", "image_size": 16}).training_digest() != plain.training_digest()


def test_digest_ignores_where_and_how_uploads_are_used():
    base = resolve({"fusions": "feature_mean"})
    assert base.training_digest() == resolve({"workers": 3, "fusions": "ensemble"}).training_digest()
    assert base.training_digest() != resolve({"train.lr": 0.04}).training_digest()
    assert resolve({"method": "fafi"}).partition_digest() == resolve({"method": "flare"}).partition_digest()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["alpah=3"], "unknown key 'alpah'; did you mean 'alpha'?"),
        (["train.lrr=3"], "unknown key 'train.lrr'; did you mean 'lr'?"),
        (["method=falre"], "unknown method 'falre'; did you mean 'flare'?"),
        (["encoder=resnet9"], "unknown encoder 'resnet9'; did you mean 'resnet8'?"),
        (["encoder.widht=3"], "unknown key 'encoder.widht'; did you mean 'width'?"),
        (["controller.lamda_max=3"], "did you mean 'lambda_max'?"),
        (["controller.schedule=cosin"], "unknown schedule 'cosin'; did you mean 'cosine'?"),
        (["train.schedule=liner"], "unknown schedule 'liner'; did you mean 'linear'?"),
        (["fusions=feature_men"], "unknown fusion 'feature_men'; did you mean 'feature_mean'?"),
        (["fusions=average,average"], "average is named twice"),
        (["partition.kind=dirichle"], "unknown partition 'dirichle'; did you mean 'dirichlet'?"),
        (["data=cifar11"], "unknown data set 'cifar11'; did you mean 'cifar10'?"),
        (["objective.terms.supcom=1"], "unknown loss term 'supcom'; did you mean 'supcon'?"),
        (["alpha=-1"], "partition.alpha: input should be greater than 0 (got -1)"),
        (["alpha=.nan"], "alpha: '.nan' is not a YAML value ('.nan' is not a finite number)"),
        (["clients=0"], "partition.clients: input should be greater than or equal to 1 (got 0)"),
        (["clients=many"], "partition.clients: input should be a valid integer"),
        (["epochs=0"], "train.epochs: input should be greater than or equal to 1"),
        (["train.precision=int4"], "train.precision: input should be"),
        (["epochs"], "'epochs' is not key=value"),
        (["controller.valve=0.001"], "too weak to hold lambda_max=50; use at least 0.01"),
        (["controller.floor=-1"], "must not be negative"),
        (["anchors=none"], "set anchors=etf or anchors=random"),
        (["upload.counts=withheld"], "choose another fusion, for example fusions=feature_mean"),
        (
            ["upload.counts=withheld", "fusions=count_prototypes"],
            "fusion count_prototypes needs counts, which the uploads withhold",
        ),
    ],
)
def test_a_mistake_is_one_clear_line_before_any_work(overrides, message):
    with pytest.raises(ConfigError) as caught:
        resolve(parse_overrides(overrides))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_term_off_is_refused():
    terms = dict.fromkeys(("cls", "supcon", "proto_feature", "proto_separation"), 0)
    with pytest.raises(ConfigError, match="at least one term"):
        resolve({"objective": {"terms": terms}})


def test_weak_valve_can_be_forced():
    assert resolve(parse_overrides(["controller.valve=0.001", "controller.force=true"])).controller["force"] is True


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "line 1"), ("- 1", "must be a mapping"), ("\x00", "not valid YAML")]
)
def test_broken_yaml_is_named(tmp_path, text, message):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_yaml(path)


def test_experiment_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        resolve({}).seed = 3


STRANGE_YAML = [
    ("upload:\n  counts_epsilon: 0.1\n  counts_epsilon: 9\n", "line 3: 'counts_epsilon' is given twice"),
    ("upload: {counts_epsilon: 0.1, 'counts_epsilon': 9}", "'counts_epsilon' is given twice"),
    ("upload: {counts_epsilon: 0.1}\nupload.counts_epsilon: 9\n", "upload.counts_epsilon is given twice"),
    ("alpha: 1\npartition: {alpha: 2}\n", "partition.alpha is given twice"),
    ("a: " + "[" * 5000 + "]" * 5000, "more than 20 levels"),
    ("a:" + " {a:" * 5000, "more than 20 levels"),
    ("seed: " + "9" * 5000, "a whole number has 5000 digits"),
    ("seed: 2027-01-31", "seed: input should be a valid integer"),
    ("seed: 2027-13-45", "seed: input should be a valid integer"),
    ("seed: 010", "'010' is read as different numbers"),
    ("train: {epochs: 1:30}", "'1:30' is read as different numbers"),
    ("seed: 1_000", "'1_000' is read as different numbers"),
    ("train: {lr: 1_0.5}", "'1_0.5' is not a decimal number"),
    ("alpha: .inf", "'.inf' is not a finite number"),
    ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "anchors and aliases"),
    ("<<: {seed: 1}\nseed: 2", "merge keys (<<)"),
    ("a: !!python/object/apply:os.system [id]", "the tag tag:yaml.org,2002:python/object/apply:os.system is not read"),
    ("1: 2", "the key 1 is a number"),
    ("yes: 2", "a key is neither text nor a number"),
    ("? [a, b]\n: 2", "a key is neither text nor a number"),
    ('method: "\\ud800"', "half a character"),
    ("method: \x1b[31m", "characters that YAML does not allow"),
    (b"method: \xff\xfe", "line 1 is not UTF-8 text"),
    ("# " + "x" * (1 << 20), "more than 1048576 characters"),
    ("encoder: {name: resnet18, width: 1000000000}", "encoder.width: must lie between 1 and 1024"),
    ("encoder: {name: resnet8, dim: 1000000000}", "encoder.dim: must lie between 1 and 65536"),
    ("encoder: {name: resnet18, width: 1024}", "encoder resnet18 would hold 2,856,502,272 numbers"),
    ("analytic: {name: random_conv, filters: 4096}", "statistics of 41056 features would hold"),
    ("partition: {clients: 1000000000}", "partition.clients: input should be less than or equal to 100000"),
    ("train: {epochs: 1000000000}", "train.epochs: input should be less than or equal to 1000000"),
]


def read_and_build(path: Path) -> None:
    """What a run does with a file of settings before it touches any image."""
    experiment = resolve(read_yaml(path))
    image = ImageSpec.default(3, 32)
    initial_network(encoder_spec(experiment.encoder, 10), image.channels, image.size, 10, 0)
    statistics_plan(experiment, image, 10, mirror=False)


@pytest.mark.parametrize(("text", "message"), STRANGE_YAML, ids=range(len(STRANGE_YAML)))
def test_yaml_that_could_be_misread_or_takes_memory_is_one_line(text, message, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_and_build(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_every_yaml_of_the_product_is_read_the_same_by_the_strict_reader():
    found = sorted(Path("src/oneflare/study/declared").glob("*.yaml"))
    assert len(found) > 10
    for path in found:
        assert strict_yaml(path.read_bytes()) == yaml.safe_load(path.read_text())
    for experiment in (Experiment(), resolve({"method": "flare_analytic"})):
        assert strict_yaml(experiment.to_yaml()) == yaml.safe_load(experiment.to_yaml())


def test_no_other_reader_of_yaml_is_used():
    for path in Path("src").rglob("*.py"):
        text = path.read_text()
        assert "yaml.safe_load" not in text, path
        assert "yaml.load" not in text, path


def test_options_of_a_group_are_given_by_their_own_names():
    from oneflare.objective.controllers import CONTROLLERS, ClientFacts
    from oneflare.objective.controllers.decoupled import MetaAnnealed

    spec = {"name": "meta_annealed", "floor": 0.25, "lambda_max": 50}
    complete = CONTROLLERS.complete(spec)
    assert (complete["floor"], complete["ceiling"], complete["lambda_max"]) == (0.25, 0.0, 50.0)
    assert "guards" not in complete
    built = CONTROLLERS.build(spec, ClientFacts((3, 1)))
    assert isinstance(built, MetaAnnealed)
    assert (built.meta.floor, built.meta.ceiling, built.meta.lambda_max) == (0.25, 0.0, 50.0)
    with pytest.raises(ConfigError, match=r"unknown key 'controller meta_annealed\.flor'; did you mean 'floor'"):
        CONTROLLERS.complete({"name": "meta_annealed", "flor": 0.25})
