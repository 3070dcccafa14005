"""Rows with images, in every form: the tokens of transformers' own processor, equal numbers of images, clear errors."""

import base64
import json

import pytest
from PIL import Image

from lightning_rlhf.data.conversations import ConversationDataModule
from lightning_rlhf.data.preferences import PreferenceDataModule
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.algorithms.unpaired_rows import UnpairedDataModule
from lightning_rlhf.extras.images.processor import load_processor
from lightning_rlhf.images import ImageSettings
from tests.data.rows_given import GivenRows, Letters
from tests.stand_ins import columns_of, each
from tests.vision_models import drawing, tokenizer, write_processor

NAMES = ("idefics3", "qwen2_5_vl", "gemma3", "internvl", "llava")
IMAGES = {"a": drawing(1), "b": drawing(2, 20, 40), "c": drawing(3, 16, 16)}
FILE_A = IMAGES["a"].read()
URL_A = f"data:image/png;base64,{base64.b64encode(FILE_A).decode()}"
# A template as that of SmolVLM and LLaVA: it reads parts, and of a text it renders nothing.
PARTS_ONLY = (
    "{% for message in messages %}{{ message.role }}:{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{% if message.role == 'assistant' %}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of the tokenizers and processors."""
    return {name: write_processor(name, tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.fixture
def make(models, tmp_path):
    """A function of a kind of data module and rows, which are written to a file beside three pictures."""
    for name, image in IMAGES.items():
        (tmp_path / f"{name}.png").write_bytes(image.read())

    def made(kind, *rows, model="idefics3", **options):
        source = options.pop("train", None)
        if source is None:
            source = str(tmp_path / "x.jsonl")
            (tmp_path / "x.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        options = {"batch_size": 1, "shuffle": False, "max_tokens": 400, **options}
        module = kind(source, str(models.get(model, model)), **options)
        module.setup("fit")
        return module

    return made


@pytest.fixture
def error_of(make, tmp_path):
    """A function of the arguments of ``make`` that returns the message of its error, without the directory."""

    def raised(kind, *rows, **options):
        with pytest.raises(UsageError) as caught:
            make(kind, *rows, **options)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return raised


def expected_ids(directory, text, *names):
    """Return the tokens that transformers' own processor makes of a text and images."""
    processor = load_processor(str(directory))._processor
    images = [[IMAGES[name].open() for name in names]] if names else None
    return list(processor(text=[text], images=images)["input_ids"][0])


def written(model):
    """Return the text of an image in the template of a model, before it is expanded."""
    return {"qwen2_5_vl": "<boi><image><eoi>", "gemma3": "<boi>"}.get(model, "<image>")


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def text_part(text):
    return {"type": "text", "text": text}


def image_part(value=None):
    return {"type": "image", "image": value}


def named(numbers):
    """Return the names of images by their numbers, with a dash for padding: ``a-`` for one image of at most two."""
    names = {image.number: name for name, image in IMAGES.items()} | {-1: "-"}
    return "".join(names[number] for number in numbers)


def batches_of(module):
    return list(module.train_dataloader())


def texts_of(module, side):
    """Return the texts of a batch of padded rows, without their end tokens, and the texts that the loss covers."""
    texts, answers = [], []
    for ids, length, mask in zip(side.input_ids, side.lengths, side.loss_mask, strict=True):
        texts.append(module.tokenizer.decode(ids[:length]))
        answers.append(module.tokenizer.decode(ids[mask]))
    return texts, answers


# -- the same prompt in many forms --------------------------------------------------------------------------------

PROMPTS = {
    "path in a part": {"prompt": [user([image_part("a.png"), text_part("look?")])]},
    "data URL in a part": {"prompt": [user([image_part(URL_A), text_part("look?")])]},
    "OpenAI": {"prompt": [user([{"type": "image_url", "image_url": {"url": URL_A}}, text_part("look?")])]},
    "OpenAI responses": {
        "prompt": [user([{"type": "input_image", "image_url": URL_A}, {"type": "input_text", "text": "look?"}])]
    },
    "path of a part": {"prompt": [user([{"type": "image", "path": "a.png"}, text_part("look?")])]},
    "url of a part": {"prompt": [user([{"type": "image", "url": URL_A}, text_part("look?")])]},
    "base64 of a part": {
        "prompt": [user([{"type": "image", "base64": base64.b64encode(FILE_A).decode()}, text_part("look?")])]
    },
    "mapping in a part": {"prompt": [user([image_part({"bytes": None, "path": "a.png"}), text_part("look?")])]},
    "texts of several parts": {"prompt": [user([image_part("a.png"), text_part("lo"), "ok?"])]},
    "keys with null": {
        "prompt": [user([{"type": "image", "image": "a.png", "text": None}, {**text_part("look?"), "image": None}])]
    },
    "TRL: part without an image": {"prompt": [user([{"type": "image"}, text_part("look?")])], "images": ["a.png"]},
    "TRL: only text": {"prompt": [user("look?")], "images": ["a.png"]},
    "TRL: only parts of text": {"prompt": [user([text_part("look?")])], "images": ["a.png"]},
    "verl: marker": {"prompt": [user("<image>look?")], "images": ["a.png"]},
    "verl: marker in a part of text": {"prompt": [user([text_part("<image>look?")])], "images": [{"path": "a.png"}]},
    "column image": {"prompt": [user("<image>look?")], "image": "a.png"},
    "column image with an empty column images": {"prompt": [user("<image>look?")], "image": "a.png", "images": None},
    "messages": {"messages": [user([image_part("a.png"), text_part("look?")]), assistant("yes")]},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "<image>look?"}, {"from": "gpt", "value": "yes"}],
        "image": "a.png",
    },
    "preference": {
        "chosen": [user("<image>look?"), assistant("yes")], "rejected": [user("<image>look?"), assistant("no")],
        "images": ["a.png"],
    },
}  # fmt: skip


@pytest.mark.parametrize("form", PROMPTS)
def test_every_form_of_a_prompt_gives_the_same_tokens_and_image(make, models, form):
    (batch,) = batches_of(make(PromptDataModule, PROMPTS[form]))
    assert each(batch, "token_ids") == [expected_ids(models["idefics3"], "user:<image>look?assistant:", "a")]
    assert each(batch, "text") == ["user:<image>look?assistant:"]
    assert columns_of(batch)["images"] == [[IMAGES["a"]]]
    assert (batch.prompts[0].images.images, named(batch.prompts[0].images.numbers)) == ((IMAGES["a"],), "a")


@pytest.mark.parametrize("model", NAMES)
def test_tokens_of_prompts_are_those_of_the_processor_of_transformers(make, models, model):
    image = written(model)
    rows = [
        {"prompt": [user([image_part("a.png"), text_part("look?"), image_part("b.png")])]},
        {
            "prompt": [user([text_part("then"), image_part("c.png")]), assistant("ok"), user("<image>")],
            "image": "a.png",
        },
        {"prompt": [user("<image>x<image>"), assistant("ok"), user("<image>")], "images": ["a.png", "b.png", "c.png"]},
    ]
    texts = [
        (f"user:{image}look?{image}assistant:", "ab"),
        (f"user:then{image}assistant:ok</s>user:{image}assistant:", "ca"),
        (f"user:{image}x{image}assistant:ok</s>user:{image}assistant:", "abc"),
    ]
    module = make(PromptDataModule, *rows, model=model, batch_size=3)
    (batch,) = batches_of(module)
    assert each(batch, "token_ids") == [expected_ids(models[model], text, *names) for text, names in texts]
    assert [row.images for row in each(batch, "images")] == [
        tuple(IMAGES[name] for name in names) for _, names in texts
    ]
    assert [named(row.numbers) for row in each(batch, "images")] == ["ab-", "ca-", "abc"]
    # The engine's tokens have one placeholder for each image.
    placeholder = module.tokenizer.convert_tokens_to_ids("<boi>" if model == "gemma3" else "<image>")
    for row, (text, names) in zip(each(batch, "images"), texts, strict=True):
        assert list(row.unexpanded_ids) == module.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert row.unexpanded_ids.count(placeholder) == len(names)


@pytest.mark.parametrize("model", NAMES)
def test_markers_of_plain_text_become_placeholders(make, models, model):
    rows = [{"prompt": "a<image>b<image>", "images": ["a.png", "b.png"]}, {"prompt": "<image>?", "image": "c.png"}]
    (batch,) = batches_of(make(PromptDataModule, *rows, model=model, batch_size=2))
    placeholder = "<boi>" if model == "gemma3" else "<image>"
    assert each(batch, "token_ids") == [
        expected_ids(models[model], f"a{placeholder}b{placeholder}", "a", "b"),
        expected_ids(models[model], f"{placeholder}?", "c"),
    ]
    assert each(batch, "text") == ["a<image>b<image>", "<image>?"]
    assert [named(row.numbers) for row in each(batch, "images")] == ["ab", "c-"]


def test_markers_of_text_that_becomes_messages_are_parts(make, models):
    row = {"prompt": "<image>look?", "images": ["a.png"]}
    (batch,) = batches_of(make(PromptDataModule, row, as_messages=True))
    assert each(batch, "token_ids") == [expected_ids(models["idefics3"], "user:<image>look?assistant:", "a")]


def test_image_without_a_place_is_put_before_the_first_message_of_the_user(make, models):
    messages = [{"role": "system", "content": "be"}, user("look?"), assistant("ok"), user("and?")]
    (batch,) = batches_of(make(PromptDataModule, {"prompt": messages, "images": ["a.png", "b.png"]}))
    text = "system:beuser:<image><image>look?assistant:ok</s>user:and?assistant:"
    assert each(batch, "token_ids") == [expected_ids(models["idefics3"], text, "a", "b")]


def test_further_columns_reach_the_rewards_beside_the_images(make):
    row = {"prompt": [user("<image>look?")], "image": "a.png", "answer": "yes", "level": 3}
    (batch,) = batches_of(make(PromptDataModule, row))
    assert columns_of(batch) == {"answer": ["yes"], "ground_truth": ["yes"], "level": [3], "images": [[IMAGES["a"]]]}
    assert each(batch, "messages") == [[user([image_part(IMAGES["a"]), text_part("look?")])]]


@pytest.mark.parametrize("kind", [PromptDataModule, ConversationDataModule])
def test_template_that_reads_only_parts_renders_all_texts(tmp_path, make, kind):
    model = write_processor("idefics3", tmp_path / "model")
    tokenizer(chat=PARTS_ONLY).save_pretrained(model)
    begin = [{"role": "system", "content": "be"}, user([image_part("a.png"), text_part("look?")]), assistant("yes")]
    rows = [{"messages": [*begin, user("and?"), assistant("no")]}, {"messages": [user("only text"), assistant("ok")]}]
    module = make(kind, *rows, model=str(model), batch_size=2)
    (batch,) = batches_of(module)
    texts = ["system:beuser:<image>look?assistant:yes</s>user:and?assistant:", "user:only textassistant:"]
    if kind is PromptDataModule:
        ids = each(batch, "token_ids")
    else:
        ids = [row[:length] for row, length in zip(batch.input_ids.tolist(), batch.lengths, strict=True)]
        texts = [text + answer for text, answer in zip(texts, ("no</s>", "ok</s>"), strict=True)]
        assert texts_of(module, batch)[1] == ["yes</s>no</s>", "ok</s>"]
    assert ids == [expected_ids(model, texts[0], "a"), expected_ids(model, texts[1])]


# -- answers ------------------------------------------------------------------------------------------------------

SIDES = {
    "parts": ([image_part("a.png"), text_part("look?")], {}),
    "column": ("<image>look?", {"images": ["a.png"]}),
    "no place": ("look?", {"images": ["a.png"]}),
}
CONVERSATIONS = {
    "messages": lambda content: {"messages": [user(content), assistant("yes")]},
    "prompt and completion": lambda content: {"prompt": [user(content)], "completion": [assistant("yes")]},
    "completion as one message": lambda content: {"prompt": [user(content)], "completion": assistant("yes")},
    "completion of parts": lambda content: {"prompt": [user(content)], "completion": [assistant([text_part("yes")])]},
}


def rows_of(forms, **columns):
    """Return a row of each form with each side, and their names."""
    names = [f"{form}, {side}" for form in forms for side in SIDES]
    rows = [{**forms[form](content), **further, **columns} for form in forms for content, further in SIDES.values()]
    return names, rows


def check_texts(module, texts, names, models, model, answer):
    """Check that all texts of a batch are the same conversation with one image, whose answer is learned."""
    expected = expected_ids(models[model], f"user:{written(model)}look?assistant:{answer}</s>", "a")
    assert dict(zip(names, texts.input_ids.tolist(), strict=True)) == dict.fromkeys(names, expected)
    assert dict(zip(names, texts_of(module, texts)[1], strict=True)) == dict.fromkeys(names, f"{answer}</s>")
    assert list(map(named, texts.images.tolist())) == ["a"] * len(names)


@pytest.mark.parametrize("model", NAMES)
def test_conversations_have_the_tokens_of_the_processor_and_learn_the_answer(make, models, model):
    names, rows = rows_of(CONVERSATIONS)
    module = make(ConversationDataModule, *rows, model=model, batch_size=len(rows))
    (batch,) = batches_of(module)
    check_texts(module, batch, names, models, model, "yes")


@pytest.mark.parametrize("kind", [ConversationDataModule, UnpairedDataModule])
def test_plain_text_with_markers_and_its_completion(make, models, kind):
    row = {"prompt": "<image>look?", "completion": " yes", "images": ["b.png"], "label": True}
    module = make(kind, row)
    (batch,) = batches_of(module)
    sequences = batch if kind is ConversationDataModule else batch.texts
    assert sequences.input_ids.tolist() == [expected_ids(models["idefics3"], "<image>look? yes</s>", "b")]
    assert texts_of(module, sequences)[1] == [" yes</s>"]
    assert list(map(named, sequences.images.tolist())) == ["b"]


def test_unpaired_answers_have_images(make, models):
    names, rows = rows_of(CONVERSATIONS, label=False)
    module = make(UnpairedDataModule, *rows, model="qwen2_5_vl", batch_size=len(rows))
    (batch,) = batches_of(module)
    check_texts(module, batch.texts, names, models, "qwen2_5_vl", "yes")
    assert not batch.desirable.any()


PAIRS = {
    "prompt": lambda content: {"prompt": [user(content)], "chosen": [assistant("yes")], "rejected": [assistant("no")]},
    "prompt and single messages": lambda content: {
        "prompt": [user(content)], "chosen": assistant("yes"), "rejected": assistant("no")
    },
    "whole conversations": lambda content: {
        "chosen": [user(content), assistant("yes")], "rejected": [user(content), assistant("no")]
    },
    "prompt and whole conversations": lambda content: {
        "prompt": [user(content)], "chosen": [user(content), assistant("yes")],
        "rejected": [user(content), assistant("no")],
    },
    "text of the prompt and whole conversations": lambda content: {
        "prompt": "look?", "chosen": [user(content), assistant("yes")], "rejected": [user(content), assistant("no")]
    },
}  # fmt: skip


def test_pairs_share_the_images_of_their_prompt(make, models):
    names, rows = rows_of(PAIRS)
    module = make(PreferenceDataModule, *rows, model="gemma3", batch_size=len(rows))
    (batch,) = batches_of(module)
    check_texts(module, batch.chosen, names, models, "gemma3", "yes")
    check_texts(module, batch.rejected, names, models, "gemma3", "no")
    assert list(module.image_store.images.values()) == [IMAGES["a"]]


def test_pairs_of_plain_text_have_images(make, models):
    row = {"prompt": "<image>look?", "chosen": " yes", "rejected": " no", "image": "a.png"}
    (batch,) = batches_of(make(PreferenceDataModule, row))
    assert batch.chosen.input_ids.tolist() == [expected_ids(models["idefics3"], "<image>look? yes</s>", "a")]
    assert batch.rejected.input_ids.tolist() == [expected_ids(models["idefics3"], "<image>look? no</s>", "a")]
    assert [named(*each.images.tolist()) for each in (batch.chosen, batch.rejected)] == ["a", "a"]


@pytest.mark.parametrize("model", NAMES)
def test_loss_covers_answers_of_all_turns_and_no_token_of_an_image(make, models, model):
    first, second = [image_part("a.png"), text_part("one?")], [text_part("two?"), image_part("b.png")]
    row = {"messages": [user(first), assistant("yes"), user(second), assistant("no")]}
    module = make(ConversationDataModule, row, model=model)
    (batch,) = batches_of(module)
    image = written(model)
    text = f"user:{image}one?assistant:yes</s>user:two?{image}assistant:no</s>"
    assert batch.input_ids.tolist() == [expected_ids(models[model], text, "a", "b")]
    assert texts_of(module, batch)[1] == ["yes</s>no</s>"]
    is_image = batch.input_ids == module.tokenizer.convert_tokens_to_ids("<image>")
    assert not batch.loss_mask[is_image].any()
    assert is_image.sum() > 1


def test_marks_of_generation_in_the_template_do_not_move_the_mask(tmp_path, make):
    model = write_processor("qwen2_5_vl", tmp_path / "model")
    marked = (
        "{% for message in messages %}{{ message.role }}:{% if message.role == 'assistant' %}{% generation %}"
        "{{ message.content }}</s>{% endgeneration %}{% elif message.content is string %}{{ message.content }}"
        "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
        "{% endif %}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer(chat=marked).save_pretrained(model)
    contents = ([image_part("b.png"), text_part("one?")], "only text")
    rows = [{"messages": [user(content), assistant("yes")]} for content in contents]
    module = make(ConversationDataModule, *rows, model=str(model), batch_size=2)
    (batch,) = batches_of(module)
    assert texts_of(module, batch)[1] == ["yes</s>", "yes</s>"]
    ids = [row[:length] for row, length in zip(batch.input_ids.tolist(), batch.lengths, strict=True)]
    texts = ("user:<image>one?assistant:yes</s>", "user:only textassistant:yes</s>")
    assert ids == [expected_ids(model, texts[0], "b"), expected_ids(model, texts[1])]


# -- numbers of images --------------------------------------------------------------------------------------------

MIXED = (
    {"prompt": [user("<image><image>x")], "images": ["a.png", "b.png"]},
    {"prompt": [user("only text")]},
    {"prompt": [user("<image>y")], "images": ["c.png"]},
    {"prompt": [user("<image>z")], "images": ["b.png"]},
    {"prompt": [user("no images")], "images": []},
    {"prompt": [user("null")], "images": None},
)


def test_every_batch_has_the_same_number_of_images_per_row(make):
    module = make(PromptDataModule, *MIXED)
    numbers = [named(row.numbers) for batch in batches_of(module) for row in each(batch, "images")]
    assert numbers == ["ab", "--", "c-", "b-", "--", "--"]
    rows = [{**row, "completion": [assistant("yes")]} for row in MIXED]
    sequences = batches_of(make(ConversationDataModule, *rows, batch_size=2))
    assert [named(row) for batch in sequences for row in batch.images.tolist()] == ["ab", "--", "c-", "b-", "--", "--"]


def test_rows_without_images_are_those_of_the_tokenizer_alone(make):
    module = make(PromptDataModule, *MIXED, batch_size=6)
    (batch,) = batches_of(module)
    text = "user:only textassistant:"
    ids = module.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert (batch.prompts[1].text, batch.prompts[1].token_ids) == (text, ids)
    assert (batch.prompts[1].images.images, list(batch.prompts[1].images.unexpanded_ids)) == ((), ids)
    assert [images if images is None else len(images) for images in columns_of(batch)["images"]] == [
        2,
        None,
        1,
        1,
        None,
        None,
    ]


def test_data_without_images_load_no_processor(make, monkeypatch):
    loaded = lambda source: pytest.fail("a processor is loaded")  # noqa: E731
    monkeypatch.setattr("lightning_rlhf.extras.images.processor.load_processor", loaded)
    module = make(PromptDataModule, {"prompt": [user("only text")]}, {"prompt": [user("<boi>")], "images": []})
    assert module.image_store is None
    assert [each(batch, "images") for batch in batches_of(module)] == [[None], [None]]
    row = {"prompt": "x", "completion": "y"}
    assert batches_of(make(ConversationDataModule, row))[0].images is None


def test_equal_pictures_of_several_rows_and_of_validation_have_one_number(make, tmp_path):
    (tmp_path / "copy.png").write_bytes(FILE_A)
    values = ("a.png", URL_A, "copy.png", {"path": "a.png"}, "b.png")
    (tmp_path / "val.jsonl").write_text(json.dumps({"prompt": [user("x")], "images": ["c.png", "a.png"]}) + "\n")
    rows = [{"prompt": [user("x")], "images": [value]} for value in values]
    module = make(PromptDataModule, *rows, val=str(tmp_path / "val.jsonl"))
    assert [named(batch.prompts[0].images.numbers) for batch in batches_of(module)] == ["a-"] * 4 + ["b-"]
    assert [named(batch.prompts[0].images.numbers) for batch in module.val_dataloader()] == ["ca"]
    assert list(module.image_store.images.values()) == [IMAGES[name] for name in "abc"]


def test_data_modules_of_the_same_data_number_images_equally(make):
    rows = [{**row, "completion": [assistant("yes")]} for row in MIXED]
    one, other = make(ConversationDataModule, *rows), make(ConversationDataModule, *rows)
    assert one.image_store.images == other.image_store.images == {IMAGES[name].number: IMAGES[name] for name in "abc"}
    assert [a.images.tolist() for a in batches_of(one)] == [b.images.tolist() for b in batches_of(other)]
    shuffled = make(ConversationDataModule, *rows, shuffle=True)
    assert shuffled.image_store.images == one.image_store.images


def test_second_setup_reads_nothing_again(make):
    module = make(PromptDataModule, *MIXED)
    store = module.image_store
    module.setup("validate")
    assert module.image_store is store


# -- sources ------------------------------------------------------------------------------------------------------


def test_images_of_parquet_files_are_structs_of_bytes_and_path(make, models, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"prompt": [user("<image>look?")], "images": [{"bytes": FILE_A, "path": "a.png"}]},
        {"prompt": [user("<image>look?")], "images": [{"bytes": None, "path": "b.png"}]},
        {"prompt": [user("only text")], "images": None},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    (batch,) = batches_of(make(PromptDataModule, train=str(tmp_path / "x.parquet"), batch_size=3))
    text = "user:<image>look?assistant:"
    assert each(batch, "token_ids")[:2] == [expected_ids(models["idefics3"], text, name) for name in "ab"]
    assert [len(row.images) for row in each(batch, "images")] == [1, 1, 0]


def test_empty_cell_of_a_csv_file_is_a_row_without_images(make, models, tmp_path):
    (tmp_path / "x.csv").write_text("prompt,image\n<image>look?,a.png\nonly text,\n")
    (batch,) = batches_of(make(PromptDataModule, train=str(tmp_path / "x.csv"), batch_size=2))
    assert [named(row.numbers) for row in each(batch, "images")] == ["a", "-"]


def test_rows_in_memory_may_have_images_that_are_read_already(make, models):
    values = (IMAGES["a"], IMAGES["a"].open(), FILE_A)
    in_parts = [{"prompt": [user([image_part(value), text_part("look?")])]} for value in values]
    in_column = [{"prompt": [user("<image>look?")], "images": [value]} for value in values]
    (batch,) = batches_of(make(PromptDataModule, train=GivenRows((*in_parts, *in_column)), batch_size=6))
    assert each(batch, "token_ids") == [expected_ids(models["idefics3"], "user:<image>look?assistant:", "a")] * 6
    assert [named(row.numbers) for row in each(batch, "images")] == ["a"] * 6


def test_folder_of_images_may_be_set(make, error_of, tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.png").rename(tmp_path / "inner" / "d.png")
    row = {"prompt": [user("<image>")], "images": ["d.png"]}
    settings = ImageSettings(folder=str(tmp_path / "inner"))
    assert batches_of(make(PromptDataModule, row, images=settings))[0].prompts[0].images.images == (IMAGES["a"],)
    assert "no image at 'd.png'" in error_of(PromptDataModule, row)
    assert make(PromptDataModule, train=GivenRows((row,)), images=settings).image_store.images == {
        IMAGES["a"].number: IMAGES["a"]
    }


# -- bad rows -----------------------------------------------------------------------------------------------------

ASKS = {"prompt": [user("<image>look?")]}
BAD = {
    "missing file": ({**ASKS, "images": ["missing.png"]}, "no image at 'missing.png': relative paths begin at"),
    "text with the name of a picture": ({**ASKS, "images": ["text.png"]}, "the image 'text.png' cannot be decoded"),
    "path outside": ({**ASKS, "images": ["../x.png"]}, "the image '../x.png' is outside of"),
    "address without remote": ({**ASKS, "images": ["https://x.example/a.png"]}, "is not local: set remote: true under"),
    "number": ({**ASKS, "images": [7]}, "an image is int, expected a path, an address, base64 or bytes"),
    "null in the column": ({**ASKS, "images": [None]}, "an image is null, expected a path"),
    "empty text in the column": ({**ASKS, "images": [""]}, "an image is empty text, expected a path"),
    "number for the column": ({**ASKS, "images": 7}, "an image is int, expected a path"),
    "empty mapping in a part": ({"prompt": [user([image_part({})])]}, "an image is a mapping with [], expected one"),
    "part without an image": ({"prompt": [user([image_part()])]}, "places for 1 images, and the column images has 0"),
    "too few places": ({**ASKS, "images": ["a.png", "b.png"]}, "places for 1 images, and the column images has 2"),
    "too many places": (
        {"prompt": [user("<image><image>")], "images": ["a.png"]}, "places for 2 images, and the column images has 1",
    ),
    "filled part and column": (
        {"prompt": [user([image_part("a.png")])], "images": ["a.png"]}, "for 0 images, and the column images has 1",
    ),
    "too few markers of plain text": (
        {"prompt": "<image>", "images": ["a.png", "b.png"]},
        "the text has 1 placeholder '<image>' for 2 images: a message needs one part of type image for each, a",
    ),
    "no marker of plain text": ({"prompt": "look?", "images": ["a.png"]}, "the text has 0 placeholders '<image>' for"),
    "too many markers of plain text": (
        {"prompt": "<image><image>", "images": ["a.png"]}, "the text has 2 placeholders '<image>' for 1 image:",
    ),
    "image of the assistant": (
        {"messages": [user("look?"), assistant([image_part("a.png")]), user("?")]},
        "a message of the assistant has an image, which a language model cannot generate",
    ),
    "marker of the assistant": (
        {"messages": [user("look?"), assistant("<image>"), user("?")], "images": ["a.png"]},
        "a message of the assistant has an image",
    ),
    "only the assistant": (
        {"prompt": [assistant("look")], "images": ["a.png"]}, "a message of the assistant has an image",
    ),
    "video": (
        {"prompt": [user([{"type": "video", "video": "a.mp4"}])]},
        "a message has a part of type 'video', expected text (with 'text') or image",
    ),
    "audio": ({"prompt": [user([{"type": "audio"}])]}, "a message has a part of type 'audio', expected text"),
    "part without a type": ({"prompt": [user([{"image": "a.png"}])]}, "a message has a part of type None, expected"),
    "part of text without a text": ({"prompt": [user([{"type": "text"}])]}, "message has a part of type 'text', exp"),
    "empty content": ({"prompt": [user([])], "images": ["a.png"]}, "needs 'role' and text or parts in 'content'"),
    "number among the parts": ({"prompt": [user([image_part("a.png"), 7])]}, "needs 'role' and text or parts in"),
    "placeholder beside an image": (
        {"prompt": [user([image_part("a.png"), text_part("a <image>?")])]},
        "the text has 2 placeholders '<image>' for 1 image: a message needs one part of type image for each",
    ),
    "placeholder without an image": (
        {"prompt": [user("a <image>?")]}, "the text has 1 placeholder '<image>' for 0 images:",
    ),
    "placeholder in plain text": ({"prompt": "a <image>?"}, "the text has 1 placeholder '<image>' for 0 images:"),
    "preference of texts": (
        {"chosen": "look? assistant: yes", "rejected": "look? assistant: no", "images": ["a.png"]},
        "no column 'prompt'",
    ),
    "too long": ({"prompt": [user("<image>" + "a" * 400)], "images": ["a.png"]}, "the prompt, with its images, has"),
}  # fmt: skip
GOOD = {**ASKS, "images": ["a.png"]}


def test_kinds_of_bad_rows_are_numerous():
    assert len(BAD) >= 30


@pytest.mark.parametrize("name", BAD)
def test_bad_row_is_reported_once_in_one_line_and_others_are_used(make, error_of, tmp_path, name):
    row, reason = BAD[name]
    (tmp_path / "text.png").write_text("Dear all,")
    message = error_of(PromptDataModule, GOOD, row)
    heading, line, *advice = message.split("\n  ")
    assert heading == "train data: 1 of 2 rows cannot be used (set on_bad_row: skip to skip them):"
    assert line.startswith("x.jsonl:2: ")
    assert reason in line
    assert len(line) < 330 + len(str(tmp_path))
    assert len(advice) == (name == "too long")
    module = make(PromptDataModule, row, GOOD, row, on_bad_row="skip", bad_rows=str(tmp_path / "bad.jsonl"))
    assert (len(module.examples["train"]), module.reports["train"].bad) == (1, 2)
    assert len(module.reports["train"].dropped) == 1
    written = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [entry["row"] for entry in written] == [row, row]
    assert all(reason in entry["why"].replace(f"{tmp_path}/", "") for entry in written)


@pytest.mark.parametrize("name", ["a.png", 7])
def test_images_beside_a_text_that_is_learned_whole_have_no_place(error_of, name):
    message = error_of(ConversationDataModule, {"text": "some text", "images": [name]})
    assert "the column images has no place in this row: use messages, or a prompt and its answer" in message


def test_texts_that_are_split_have_no_place_for_images(error_of):
    row = {"chosen": "look? A: yes", "rejected": "look? A: no", "images": ["a.png"]}
    for kind in (PreferenceDataModule, PromptDataModule):
        assert "the column images has no place in this row" in error_of(kind, row, split_after="A:")


@pytest.mark.parametrize("kind", [ConversationDataModule, UnpairedDataModule])
def test_placeholder_in_an_answer_is_bad(error_of, kind):
    rows = [
        {"prompt": "<image>?", "completion": " a <image>", "images": ["a.png"], "label": True},
        {"prompt": [user([image_part("a.png")])], "completion": [assistant("a <image>")], "label": True},
    ]
    message = error_of(kind, *rows)
    assert "x.jsonl:1: the text has 1 placeholder '<image>' for 0 images" in message
    assert "x.jsonl:2: the text has 2 placeholders '<image>' for 1 image" in message


def test_placeholder_in_a_pair_is_bad(error_of):
    row = {"prompt": "<image>?", "chosen": " a", "rejected": " <image>", "images": ["a.png"]}
    assert "the text has 1 placeholder '<image>' for 0 images" in error_of(PreferenceDataModule, row)


@pytest.mark.parametrize("kind", [PromptDataModule, ConversationDataModule])
def test_placeholder_in_a_text_is_bad_in_any_order_of_the_rows(make, kind):
    typed = {"prompt": [user("a <image>?")], "completion": [assistant("b")]}
    good = {**GOOD, "completion": [assistant("b")]}
    plain = {"prompt": [user("text")], "completion": [assistant("b")]}
    for rows in ((good, typed, plain), (typed, good, plain), (plain, typed, good)):
        module = make(kind, *rows, on_bad_row="skip")
        report = module.reports["train"]
        assert dict(report.dropped) == {"the numbers of placeholders and images differ": 1}
        assert (report.used, len(report.locations), len(module.examples["train"])) == (2, 2, 2)


def test_placeholder_in_a_text_before_the_images_of_validation_is_bad(error_of, tmp_path):
    (tmp_path / "val.jsonl").write_text(json.dumps(GOOD) + "\n")
    message = error_of(PromptDataModule, {"prompt": [user("a <image>?")]}, val=str(tmp_path / "val.jsonl"))
    assert "train data: 1 of 1 rows cannot be used" in message
    assert "the text has 1 placeholder '<image>' for 0 images" in message


def test_token_of_a_feature_in_a_text_is_bad(error_of):
    rows = [{"prompt": [user([image_part("a.png"), text_part("<image>")])]}, {"prompt": [user("<image>")]}]
    message = error_of(PromptDataModule, *rows, model="gemma3")
    assert message.count("the text contains '<image>', which stands for a part of an image: remove it") == 2


def test_image_that_the_processor_rejects_is_a_bad_row(make, error_of, tmp_path):
    Image.new("RGB", (20000, 1)).save(tmp_path / "long.png")
    Image.new("RGB", (1, 1)).save(tmp_path / "dot.png")
    rows = [{"prompt": [user("<image>")], "images": [name]} for name in ("long.png", "dot.png")]
    assert (
        "x.jsonl:1: the image processor rejects an image of 20000 x 1 pixels: absolute aspect ratio must be"
        in error_of(PromptDataModule, *rows, model="qwen2_5_vl")
    )
    module = make(PromptDataModule, *rows, model="qwen2_5_vl", on_bad_row="skip")
    assert dict(module.reports["train"].dropped) == {"the image processor rejects an image": 1}
    assert len(make(PromptDataModule, *rows, model="idefics3").examples["train"]) == 2


@pytest.mark.parametrize("too_long", ["bad_row", "drop", "cut_start", "cut_end", "cut_middle"])
@pytest.mark.parametrize("kind", [PromptDataModule, ConversationDataModule, PreferenceDataModule, UnpairedDataModule])
def test_texts_with_images_are_never_cut(error_of, make, kind, too_long):
    row = {**GOOD, "label": True}
    row |= {"chosen": [assistant("yes")], "rejected": [assistant("no")]} if kind is PreferenceDataModule else {}
    row |= {"completion": [assistant("yes")]} if kind in (ConversationDataModule, UnpairedDataModule) else {}
    tokens = make(kind, row).longest_text_tokens
    assert len(make(kind, row, max_tokens=tokens, too_long=too_long).examples["train"]) == 1
    message = error_of(kind, row, max_tokens=tokens - 1, too_long=too_long)
    if too_long == "drop":
        assert f", with its images, longer than {tokens - 1} tokens" in message
        return
    assert f", with its images, has {tokens} tokens, the limit is {tokens - 1}" in message
    assert "to use longer rows with images, which are never cut, raise max_tokens" in message
    assert "too_long: " not in message


def test_texts_without_images_are_cut_beside_rows_with_images(make):
    rows = [GOOD, {"prompt": [user("a" * 200)]}]
    module = make(PromptDataModule, *rows, max_tokens=100, too_long="cut_end")
    assert [len(example.token_ids) for example in module.examples["train"]][1] == 100
    assert module.reports["train"].cut.total() == 1


# -- models that read no images -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row", [GOOD, {"prompt": [user([image_part("missing.png")])]}, {"prompt": "<image>", "image": "a.png"}]
)
def test_tokenizer_of_a_text_model_is_rejected_in_one_line(error_of, tmp_path, row):
    CharacterTokenizer("abc").load().save_pretrained(tmp_path / "text-model")
    message = error_of(PromptDataModule, row, model=str(tmp_path / "text-model"), on_bad_row="skip")
    assert message == (
        "'text-model' has no processor of a vision-language model that transformers knows: images need the directory "
        "or hub id of one as tokenizer"
    )


def test_tokenizer_that_is_not_read_from_a_directory_is_rejected_in_one_line():
    module = PromptDataModule(GivenRows((GOOD,)), Letters(chat=True), on_bad_row="skip")
    with pytest.raises(UsageError) as caught:
        module.setup("fit")
    assert str(caught.value) == (
        "images need the processor of a vision-language model: set tokenizer to the directory or hub id of one"
    )


# -- rows that are not used ---------------------------------------------------------------------------------------


def test_bad_rows_are_counted_by_kind_and_good_ones_are_used(make, tmp_path):
    for number in range(3):
        (tmp_path / f"text {number}.png").write_text("Dear all,")
    paths = ["a.png", "text 0.png", "missing 1.png", "text 1.png", "b.png", "missing 2.png", "text 2.png", "a.png"]
    module = make(PromptDataModule, *({**ASKS, "images": [path]} for path in paths), on_bad_row="skip")
    assert str(module.reports["train"]) == (
        "train data: 8 rows read, 3 kept; dropped 3: an image cannot be decoded; dropped 2: an image is missing"
    )
    assert [named(batch.prompts[0].images.numbers) for batch in batches_of(module)] == ["a", "b", "a"]


def test_file_of_bad_rows_describes_images_that_are_no_json(make, tmp_path):
    values = (IMAGES["a"], IMAGES["b"].open(), FILE_A, {"bytes": FILE_A, "path": None})
    bad = [
        {"prompt": [user("no " * 200 + "<image>")], "images": [value], "number": n} for n, value in enumerate(values)
    ]
    rows = GivenRows((*bad, {**ASKS, "images": [IMAGES["c"]]}))
    module = make(PromptDataModule, train=rows, on_bad_row="skip", bad_rows=str(tmp_path / "bad.jsonl"))
    assert (len(module.examples["train"]), module.reports["train"].bad) == (1, 4)
    written = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [(entry["where"], entry["row"]["number"]) for entry in written] == [(f"given:{n + 1}", n) for n in range(4)]
    assert written[0]["row"]["images"] == [str(IMAGES["a"])]
