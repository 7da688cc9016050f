"""The measure of prose, on prose and on what stands beside it in documentation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.document import Drop
from data_pipeline.stages.prose import LONG, Prose, measure, paragraphs

PROSE = {
    "novel": """
        It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness,
        it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of
        Darkness, it was the spring of hope, it was the winter of despair.""",
    "encyclopedia": """
        A river is a natural stream of fresh water that flows on land or inside caves towards another body of water at
        a lower elevation, such as an ocean, lake, or another river. A river may run dry before reaching the end of its
        course if it runs out of water, or only flow during certain seasons.""",
    "manual": """
        The shell reads its input and divides it into words and operators, obeying the quoting rules. These tokens are
        separated by metacharacters. Alias expansion is performed by this step, and then the shell parses the tokens
        into simple and compound commands (see Section 3.2).""",
}
NO_PROSE = {
    "parameters in numpy's style": """
        Parameters
        ----------
        x : array_like
            The numbers of which the sum is taken. It can be of any shape, and it is not changed.
        axis : int, optional
            The axis over which the sum is taken. By default it is that of all of the numbers in the array.
        """,
    "parameters in Sphinx's style": """
        :param x: the numbers of which the sum is taken. It can be of any shape, and it is not changed.
        :param axis: the axis over which the sum is taken. It is that of all of the numbers if it is not given.
        :returns: the sum of the numbers over the axis, or that of all of them where there is no axis.""",
    "code": """
        for name, value in sorted(values.items()):
            if value is not None and name in known:
                print(f"the {name} is {value} and that is what it should be in the end")
            else:
                raise ValueError("it is not known and so it cannot be in the list of names.")""",
    "session": """
        >>> numbers = [1, 2, 3]
        >>> sum(numbers)
        6""",
    "table": """
        year   runners  miles   hours
        1990   1,204    26.2    2:10:20
        1991   1,377    26.2    2:11:06
        1992   1,519    26.2    2:09:43""",
    "changelog": """
        * Fixed #4711: a crash in the parser when the file is empty and there is no newline at the end of it.
        * Added ``--quiet`` to all of the commands, so that they can be called by the other programs.
        * Removed the old format, because it has not been the one that is written for more than a year.""",
    "changelog of Debian": """
        bash (5.2.15-2) unstable; urgency=medium

          * Add the patches from upstream to the package, so that it is that of the newest release.

         -- Somebody <somebody@debian.org>  Mon, 23 Jan 2023 09:15:41 +0100""",
    "headings": "The Use of It\n\nWhat There Is to Be Said About the Rest of It\n\nAnd So On",
    "names": "ThreadPoolExecutor ProcessPoolExecutor AbstractEventLoop BaseTransport DatagramProtocol SubprocessError.",
}


@pytest.mark.parametrize("kind", PROSE)
def test_prose_is_kept_as_one_line_for_each_paragraph(kind: str) -> None:
    text = PROSE[kind].strip("\n")
    kept = Prose(min_words=20).apply(f"A Title\n=======\n{text}\n\nThe End\n")
    assert kept == " ".join(text.split())
    made_of = measure(text)
    assert made_of.function_words / made_of.words > 2 * Prose().min_function_words - 0.05


@pytest.mark.parametrize("kind", NO_PROSE)
def test_lists_tables_and_code_are_not_prose(kind: str) -> None:
    assert Prose().prose_of(NO_PROSE[kind]) == []
    assert Prose().apply(f"{NO_PROSE[kind]}\n\n{LONG}") == LONG


def test_each_bound_can_be_what_drops_a_paragraph() -> None:
    assert Prose().apply(LONG) == LONG
    for bound in ("min_words=61", "min_paragraph_words=61", "min_function_words=0.9", "min_letters=0.99"):
        name, _, value = bound.partition("=")
        assert Prose.model_validate({name: value}).apply(LONG) == Drop("too little prose"), bound
    assert Prose(max_sentence_words=19.5).apply(LONG) == Drop("too little prose")
    assert Prose(max_sentence_words=20).apply(LONG) == LONG


def test_a_composition_counts_what_it_says() -> None:
    made_of = measure('The cat said "no". It sat on 3 mats!')
    assert (made_of.characters, made_of.words, made_of.sentences) == (36, 9, 2)
    assert made_of.function_words == len(["The", "no", "It", "on"])
    assert made_of.letters == made_of.characters - len('"".3!')
    assert made_of.sentence_words == 4.5


PIECES = st.sampled_from([*PROSE.values(), *NO_PROSE.values(), LONG, "\n", "  ", "- ", ".\n", "Who goes there?"])
TEXTS = st.one_of(st.text(), st.lists(PIECES, max_size=8).map("\n\n".join), st.lists(PIECES, max_size=8).map("".join))


@given(TEXTS)
def test_prose_comes_out_as_it_went_in(text: str) -> None:
    kept = Prose(min_words=1).apply(text)
    if isinstance(kept, str):
        assert Prose(min_words=1).apply(kept) == kept
        assert kept.split() == [word for part in Prose().prose_of(text) for word in part.split()]


@given(TEXTS, TEXTS)
def test_paragraphs_are_judged_each_by_itself(one: str, other: str) -> None:
    assert Prose().prose_of(f"{one}\n\n{other}") == [*Prose().prose_of(one), *Prose().prose_of(other)]


@given(TEXTS)
def test_a_composition_is_within_its_text(text: str) -> None:
    made_of = measure(text)
    assert made_of.letters == sum(sign.isalpha() or sign.isspace() for sign in text)
    assert 0 <= made_of.function_words <= made_of.words == len(text.split())
    assert 0 <= made_of.letters <= made_of.characters == len(text)
    assert 0 <= made_of.sentences <= made_of.words
    assert all("\n" not in paragraph and paragraph.strip() == paragraph != "" for paragraph in paragraphs(text))


def test_a_long_hostile_text_takes_no_longer_than_its_length() -> None:
    for text in (
        "\n" * 200_000, " " * 200_000, "\n-" * 100_000, "." * 200_000, ".''''" * 40_000, "\n" + "-" * 200_000 + "x",
    ):  # fmt: skip
        assert Prose().apply(text) == Drop("too little prose")
