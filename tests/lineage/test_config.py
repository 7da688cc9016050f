"""Configuration files: what they may say, and the sentence a user gets when they say something
else."""

from pathlib import Path

import pytest

from mlm_repro.lineage.config import Config, load_config, override_config, read_toml
from mlm_repro.lineage.errors import BadInput


class Wheel(Config):
    """A section that stands in a list."""

    diameter: int
    spokes: int = 36


class Engine(Config):
    """A section."""

    power: float = 1.0
    fuel: str = "petrol"
    turbo: bool = False


class Car(Config):
    """A configuration with a section, an optional section and a list of sections."""

    name: str
    engine: Engine = Engine()
    spare: Wheel | None = None
    wheels: tuple[Wheel, ...] = ()


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def load(folder: Path, text: str, *overrides: str) -> Car:
    return load_config(write(folder / "car.toml", text), Car, overrides)


def test_a_file_becomes_a_frozen_model(tmp_path: Path) -> None:
    car = load(tmp_path, 'name = "a"\n[engine]\npower = 2\n[[wheels]]\ndiameter = 20\n')
    assert car == Car(name="a", engine=Engine(power=2.0), wheels=(Wheel(diameter=20),))
    with pytest.raises(ValueError, match="frozen"):
        car.name = "b"


def test_extends_is_relative_to_the_file_and_the_nearest_file_wins(tmp_path: Path) -> None:
    write(
        tmp_path / "base" / "first.toml",
        'name = "first"\n[engine]\npower = 1\nfuel = "coal"\nturbo = true\n',
    )
    write(
        tmp_path / "base" / "second.toml",
        'extends = "first.toml"\nname = "second"\n[engine]\npower = 2\n',
    )
    third = write(
        tmp_path / "third.toml", 'extends = "base/second.toml"\n[engine]\nfuel = "steam"\n'
    )
    assert load_config(third, Car) == Car(
        name="second", engine=Engine(power=2.0, fuel="steam", turbo=True)
    )


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_circle_of_extends_is_named(tmp_path: Path, length: int) -> None:
    for number in range(length):
        write(tmp_path / f"{number}.toml", f'extends = "{(number + 1) % length}.toml"\n')
    with pytest.raises(BadInput, match="circle"):
        read_toml(tmp_path / "0.toml")


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("engine.power=200", ("engine", "power"), 200.0),
        ("engine.turbo=true", ("engine", "turbo"), True),
        ("engine.fuel=hay and oats", ("engine", "fuel"), "hay and oats"),
        ('engine.fuel="=hay"', ("engine", "fuel"), "=hay"),
        ("name=355m-twin", ("name",), "355m-twin"),
        ("wheels=[{diameter=3}]", ("wheels",), (Wheel(diameter=3),)),
        ("engine={power=7.5}", ("engine", "power"), 7.5),
    ],
)
def test_an_override_is_read_as_toml(
    tmp_path: Path, override: str, path: tuple[str, ...], value: object
) -> None:
    text = 'name = "a"\n[engine]\nfuel = "coal"\n'
    found: object = load(tmp_path, text, override)
    again: object = override_config(load(tmp_path, text), [override])
    for part in path:
        found, again = getattr(found, part), getattr(again, part)
    assert found == again == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "override", ["engine.power", "=3", "engine..power=3", ".power=3", "engine.=3", ""]
)
def test_an_override_of_another_form_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(BadInput, match=r"section\.key=value"):
        load(tmp_path, 'name = "a"\n', override)


@pytest.mark.parametrize(
    ("text", "overrides", "sentence"),
    [
        ('nmae = "a"\n', (), "unknown key 'nmae'; did you mean 'name'?"),
        (
            'name = "a"\n[engine]\npwoer = 1\n',
            (),
            "unknown key 'engine.pwoer'; did you mean 'power'?",
        ),
        (
            'name = "a"\n',
            ("turbo=1",),
            "car.toml --set turbo=1: unknown key 'turbo'; this program's key is engine.turbo",
        ),
        ('name = "a"\n', ("engine.turob=1",), "unknown key 'engine.turob'; did you mean 'turbo'?"),
        (
            'name = "a"\n[spare]\ndiametre = 1\ndiameter = 1\n',
            (),
            "'spare.diametre'; did you mean 'diameter'?",
        ),
        (
            'name = "a"\n[[wheels]]\ndiameter = 1\n[[wheels]]\ndiameter = 1\nspoke = 3\n',
            (),
            "unknown key 'wheels.1.spoke'; did you mean 'spokes'?",
        ),
        ('name = "a"\n[spare]\nspokes = 3\n', (), "missing key 'spare.diameter'"),
        ("", (), "missing key 'name'"),
        ('name = "a"\n[engine]\npower = "much"\n', (), "engine.power: "),
        ('x = 1\ny = 2\nname = "a"\n', (), "unknown key 'x'; also unknown: y"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, text: str, overrides: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(BadInput) as caught:
        load(tmp_path, text, *overrides)
    assert sentence in str(caught.value)
    assert str(tmp_path / "car.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_like_no_other_gets_no_suggestion(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        load(tmp_path, 'name = "a"\nzzzzzz = 1\n')
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist"),
        (b'name = "a', "is not valid TOML"),
        (b"power = " + b"9" * 5000, "is not valid TOML"),
        (b'name = "a"\nname = "b"\n', "is not valid TOML"),
        (b'name = "\xff\xfe"\n', "cannot be read"),
        (b'extends = "nowhere.toml"\n', "nowhere.toml does not exist"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    path = tmp_path / "car.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        load_config(path, Car)
    assert sentence in str(caught.value)
    assert str(tmp_path) in str(caught.value)
