from __future__ import annotations

import pytest

from oneflare.config import SHORT_FORMS, Experiment, merge, parse_overrides, read_yaml
from oneflare.errors import ConfigError
from oneflare.methods.resolve import resolve


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
    base = resolve({})
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
        (["upload.counts=withheld"], "fusion count_prototypes needs counts, which the uploads withhold"),
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
