"""The Trainer of Hugging Face on virtual devices, patched and by the subclass of the example."""

import dataclasses
import sys

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

import pyparallel  # noqa: E402

VOCABULARY = 40
EXAMPLE = "02_trainer.py"
ROUNDING = 1e-8  # Trainer divides by a float32 number of items


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()


def language_model():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=None, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def texts(rows):
    """Rows with different numbers of tokens that count."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (rows, 8), generator=generator)
    lengths = torch.randint(3, 9, (rows, 1), generator=generator)
    labels = torch.where(torch.arange(8) < lengths, ids, -100)
    return [{"input_ids": i, "labels": one} for i, one in zip(ids, labels, strict=True)]


@pytest.fixture
def make(tmp_path, example, monkeypatch):
    """Returns a function that makes a trainer of batches of 4 rows, on one device or several."""

    def trainer(n, data, model=None, trainer_kwargs=None, **settings):
        cls = example(EXAMPLE).VirtualArguments if n > 1 else TrainingArguments
        monkeypatch.setattr(example(EXAMPLE).VirtualArguments, "n_gpu", n)
        arguments = cls(
            **{
                "output_dir": str(tmp_path / f"{n}"),
                "use_cpu": True,
                "per_device_train_batch_size": 4 // n,
                "per_device_eval_batch_size": 4 // n,
                "num_train_epochs": 2,
                "optim": "sgd",
                "learning_rate": 0.1,
                "max_grad_norm": 0,  # clipping would hide a wrong scale
                "seed": 0,
                "save_strategy": "no",
                "report_to": [],
                "disable_tqdm": True,
                "logging_steps": 1,
                **settings,
            }
        )
        cls = example(EXAMPLE).ParallelTrainer if n > 1 else Trainer
        model = model or language_model()
        return cls(model, arguments, train_dataset=data, eval_dataset=data, **trainer_kwargs or {})

    return trainer


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def losses(trainer):
    return torch.tensor([float(e["loss"]) for e in trainer.state.log_history if "loss" in e])


def assert_trained_alike(one, several):
    learnt = losses(one)
    assert learnt[-1] != learnt[0], "the training changes nothing"
    torch.testing.assert_close(weights(several), weights(one), rtol=0, atol=ROUNDING)
    torch.testing.assert_close(losses(several), learnt)


# The example's subclass.


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "n, rows",
    [
        pytest.param(2, 12, id="full batches"),
        pytest.param(2, 11, id="last batch of 3"),
        pytest.param(2, 9, id="last batch of 1, so one device is left out"),
        pytest.param(4, 11, id="last batch of 3 on 4 devices"),
    ],
)
def test_weights_are_those_of_one_device(n, rows, accumulate, make):
    one, several = (make(k, texts(rows), gradient_accumulation_steps=accumulate) for k in (1, n))
    one.train()
    several.train()
    assert type(several.model_wrapped) is pyparallel.DataParallel
    assert several.model_wrapped.device_ids == list(range(n))
    assert several.model_wrapped.split == "balanced"
    assert_trained_alike(one, several)


def test_each_replica_gets_the_number_of_items_of_the_whole_batch(make):
    seen = []

    class Spy(GPT2LMHeadModel):
        def forward(self, input_ids=None, labels=None, num_items_in_batch=None):
            seen.append((len(input_ids), num_items_in_batch.flatten().tolist()))
            return super().forward(
                input_ids=input_ids, labels=labels, num_items_in_batch=num_items_in_batch
            )

    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in texts(9)]
    model = Spy(language_model().config).double()
    model.accepts_loss_kwargs = True
    make(2, data, model, num_train_epochs=1).train()
    (_, (per_row,)), *_ = sorted(seen)
    assert per_row >= 7
    assert sorted(seen) == [(1, [per_row]), *[(2, [4 * per_row])] * 4]


def sum_of_squares(outputs, labels, num_items_in_batch=None):
    return (outputs["logits"] ** 2).sum() / num_items_in_batch


def mean_of_squares(outputs, labels, num_items_in_batch=None):
    return (outputs["logits"] ** 2).mean()


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("loss", [sum_of_squares, mean_of_squares])
@pytest.mark.parametrize("rows", [12, 9])
def test_a_loss_of_the_gathered_outputs(loss, rows, average, make):
    data = texts(rows)
    if not average:
        # Trainer divides the number of items by that of devices, and rounds it down: make it even.
        data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in data]
    one, several = (
        make(
            k,
            data,
            trainer_kwargs={"compute_loss_func": loss},
            average_tokens_across_devices=average,
            learning_rate=0.001,
        )
        for k in (1, 2)
    )
    one.train()
    several.train()
    assert_trained_alike(one, several)


@pytest.mark.parametrize("rows", [12, 9])
def test_label_smoothing(rows, make):
    one, several = (make(k, texts(rows), label_smoothing_factor=0.1) for k in (1, 2))
    one.train()
    several.train()
    assert_trained_alike(one, several)


class Regression(nn.Module):
    """Takes no ``num_items_in_batch``: each replica returns the mean over its rows."""

    def __init__(self, config=None):
        super().__init__()
        torch.manual_seed(0)
        self.config = config
        self.linear = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x, labels):
        y = self.linear(x)
        return {"loss": (y - labels).square().mean(), "logits": y}


class CarelessRegression(Regression):
    """Lets Trainer think that it divides by ``num_items_in_batch``, as several models do."""

    def forward(self, x, labels, **kwargs):
        return super().forward(x, labels)


@pytest.mark.parametrize("model", [Regression, CarelessRegression])
def test_models_that_return_means(model, make):
    generator = torch.Generator().manual_seed(1)
    x, labels = (torch.randn(12, k, generator=generator, dtype=torch.float64) for k in (3, 1))
    data = [{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)]
    one, several = (make(k, data, model()) for k in (1, 2))
    one.train()
    several.train()
    assert_trained_alike(one, several)


@pytest.mark.parametrize("rows", [12, 9])
def test_evaluate_and_predict(rows, make):
    one, several = (make(k, texts(rows)) for k in (1, 2))
    assert several.evaluate()["eval_loss"] == pytest.approx(one.evaluate()["eval_loss"], rel=1e-6)
    expected, predicted = (trainer.predict(trainer.eval_dataset) for trainer in (one, several))
    assert predicted.predictions.shape == (rows, 8, VOCABULARY)
    assert abs(predicted.predictions - expected.predictions).max() < 1e-12
    assert (predicted.label_ids == expected.label_ids).all()


def test_saved_models_have_no_prefix_and_load_anywhere(make, tmp_path):
    trainer = make(2, texts(12))
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    loaded, info = GPT2LMHeadModel.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.dtype == torch.float64
    ids = torch.arange(8)[None]
    torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits)


@pytest.mark.parametrize("resumed_on", [1, 2])
def test_training_resumes_from_a_checkpoint(resumed_on, make, tmp_path):
    settings = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 3}
    whole = make(2, texts(11), output_dir=str(tmp_path / "a"), **settings)
    whole.train()
    rest = make(resumed_on, texts(11), output_dir=str(tmp_path / "b"), **settings)
    rest.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert rest.state.global_step == 6
    torch.testing.assert_close(weights(rest), weights(whole), rtol=0, atol=1e-12)


class SeesAutocast(Regression):
    seen: list = []  # noqa: RUF012

    def forward(self, x, labels):
        output = super().forward(x.float(), labels)
        self.seen.append((torch.is_autocast_enabled("cpu"), output["logits"].dtype))
        return output


def test_bf16_reaches_the_replicas_in_training_and_evaluation(make):
    data = [{"x": torch.ones(3), "labels": torch.ones(1)} for _ in range(4)]
    trainer = make(2, data, SeesAutocast().float(), bf16=True, num_train_epochs=1)
    SeesAutocast.seen.clear()
    trainer.train()
    trainer.evaluate()
    assert SeesAutocast.seen == [(True, torch.bfloat16)] * 4


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"gradient_checkpointing": True}, id="gradient checkpointing"),
        pytest.param({"optim": "adamw_torch_fused"}, id="fused optimizer"),
        pytest.param({"max_grad_norm": 0.5}, id="clipped"),
        pytest.param({"auto_find_batch_size": True}, id="auto_find_batch_size"),
    ],
)
def test_options_of_trainer(settings, make):
    one, several = (make(k, texts(11), **settings) for k in (1, 2))
    one.train()
    several.train()
    torch.testing.assert_close(weights(several), weights(one), rtol=0, atol=1e-9)


def test_a_model_that_the_user_compiled(make):
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph

    data = [{"x": torch.ones(3).double(), "labels": torch.ones(1).double()} for _ in range(4)]
    model = Regression()
    model.compile(backend=backend)
    one, several = make(1, data, Regression()), make(2, data, model)
    one.train()
    several.train()
    assert calls, "not compiled"
    assert_trained_alike(one, several)


def test_accelerate_finds_the_model(make):
    trainer = make(2, texts(4))
    trainer.train()
    assert trainer.accelerator.unwrap_model(trainer.model_wrapped) is trainer.model
    trainer.train()
    assert trainer.model_wrapped.module is trainer.model, "wrapped once"


def test_with_one_device_nothing_changes(make, example, tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    model = language_model()
    trainer = example(EXAMPLE).ParallelTrainer(model, arguments, train_dataset=texts(4))
    assert trainer._wrap_model(model) is model


def test_virtual_arguments_survive_what_users_do_with_them(example, tmp_path):
    cls = example(EXAMPLE).VirtualArguments
    arguments = cls(output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=3)
    assert arguments.n_gpu == 2 and arguments.train_batch_size == 6
    assert dataclasses.replace(arguments, seed=1).n_gpu == 2
    parser = transformers.HfArgumentParser(cls)
    (parsed,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--use_cpu"])
    assert parsed.n_gpu == 2


def test_the_subclass_mixes_with_others(example, tmp_path):
    class Arguments(example(EXAMPLE).VirtualArguments, transformers.Seq2SeqTrainingArguments):
        pass

    class Mixed(example(EXAMPLE).ParallelTrainer, transformers.Seq2SeqTrainer):
        pass

    arguments = Arguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1, save_strategy="no"
    )
    trainer = Mixed(language_model(), arguments, train_dataset=texts(4), eval_dataset=texts(4))
    trainer.train()
    assert type(trainer.model_wrapped) is pyparallel.DataParallel
    assert trainer.evaluate()["eval_loss"] > 0


def test_the_example_learns(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [EXAMPLE, "--steps", "20"])
    example(EXAMPLE).main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("2 devices") and float(last.split()[-1]) < 3.5


# Without a subclass.


@pytest.mark.parametrize("rows", [12, 11])
def test_an_unchanged_trainer_while_patched(rows, make, recipe):
    one, prepared = (make(1, texts(rows)) for _ in range(2))
    one.train()
    arguments = dataclasses.replace(prepared.args, per_device_train_batch_size=2)
    several = recipe("Trainer, unchanged", model=prepared.model, args=arguments, data=texts(rows))[
        "trainer"
    ]
    assert type(several) is Trainer
    assert type(several.model_wrapped) is pyparallel.DataParallel
    assert (several.model_wrapped.device_ids, several.model_wrapped.split) == ([0, 1], "balanced")
    assert_trained_alike(one, several)
    assert several.accelerator.unwrap_model(several.model_wrapped) is several.model
