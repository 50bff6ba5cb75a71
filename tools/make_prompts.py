"""Writes the prompt sets that ship with ray_trainer, the tiny policy's apart.

    python tools/make_prompts.py [FOLDER]     (default: packages/ray-trainer/src/ray_trainer/assets/prompts)

Standard library only, and the same bytes every time. Train and held-out share no subject: no text to be written, no question
about a scene, no creature, place or event. They are small stand-ins for the published data sets, which are not ours to ship.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "packages/ray-trainer/src/ray_trainer/assets/prompts"
Row = dict[str, Any]

# ---------------------------------------------------------------------------------------------------------------- text in pictures

# Scene with {} where the text stands, then the texts. The last three of each are held out.
OCR = """\
A hand-painted sign above a bakery door that reads {}, early morning, warm light from inside
|Fresh Bread|Warm Rolls|Open Daily|Golden Crust|Flour & Salt|Daily Loaf|Cinnamon Hour|Rye & Seed
A neon sign in a rainy side street that says {}, reflections on wet asphalt
|Night Owl|Hotel Luna|Jazz Tonight|Open 24 Hours|Blue Velvet|Ramen Bar|Lucky Star|Last Call
A birthday cake on a kitchen table with {} written in chocolate icing
|Happy Birthday Mia|Forty at Last|Hooray|Congrats Ben|Seven Today|Well Done Team|Happy 90th|Sweet Sixteen
A green chalkboard in an empty classroom with {} written in neat white chalk
|Homework Due Friday|E = mc2|Quiet Please|Spelling Test|Welcome Back|Group Work|Read Chapter 4|Exam at Nine
A white coffee mug on a wooden desk printed with {} in bold black letters
|World's Okayest Boss|But First Coffee|Monday Again|Do Not Disturb|Code More|Stay Curious|Decaf Is a Lie|One More Cup
A highway sign at dusk that shows {}, headlights passing below
|Exit 42|Rest Area 5 km|Bridge Closed|North Harbor|Slow Down|Airport Next Right|Fog Ahead|Tunnel 800 m
The cover of an old hardback novel on a shelf, its title is {} in gold letters
|The Salt Road|Winter's Orchard|A House of Bees|Seven Quiet Rivers|The Last Cartographer|Ink and Ash|The Glass Tide|Paper Moons
A protester in a crowd holding a cardboard sign that reads {}, shallow depth of field
|Save Our Park|There Is No Planet B|Fair Pay Now|Books Not Bombs|Trees Not Tarmac|Let Us Vote|Hands Off Our River|Enough
A vintage travel poster of a mountain railway with the words {} across the top
|Visit the Alps|Ride the Summit Line|See Norway|Slow Travel|Peak Season|Above the Clouds|Go by Rail|Snow Country
The side of a delivery van parked at a curb, lettered {} in red
|Rapid Parcel|Green Grocer|Moving Day|Fix It Fast|Petal Post|Ice Cream|Harbor Fish Co|Tiny Movers
A spaceship control panel with a round display glowing {}, dark cabin
|Hull Breach|Docking Complete|Fuel 12%|Course Set|Signal Lost|Wake Crew|Airlock Open|Orbit Stable
A jar of homemade jam on a checked tablecloth, its label says {}
|Plum 2024|Fig & Honey|Sour Cherry|Aunt Rosa's|Best of Summer|Quince Jelly|Apricot No 7|Blackberry
A grey T-shirt on a clothes line in the sun, printed with {} on the chest
|Born to Hike|Team Cactus|Slow Runner|I Paused My Game|Vinyl Club|Sea Dog|Nap Champion|Ask Me Later
Graffiti on a concrete underpass wall spelling {} in bright bubble letters
|Dream Big|Echo|Made of Stars|Be Kind|Concrete Garden|No Signal|Loud Colors|Sky Thief
A theater marquee at night with {} in black letters on a lit white board
|Sold Out|Opening Night|Hamlet|One Night Only|The Magic Flute|Swan Lake|Closing Soon|Twelfth Night
A laptop screen in a dim office showing only the message {} in the middle
|Update Failed|Saving|Hello World|Build Passed|Low Battery|Connection Lost|Try Again|Access Granted
A wooden trail marker in a pine forest carved with {} and an arrow
|Lake Trail|Summit 3 km|Fox Hollow|Old Mill|Danger Cliff|Campsite B|Bear Creek|Lookout
The front page of a newspaper on a cafe table, with the headline {}
|Moon Base Opens|Rain at Last|Local Hero|Markets Calm|Bridge Reopens|Record Harvest|Comet Returns|Team Wins Cup
A fridge door with colorful magnet letters that spell {}
|Buy Milk|Love You|Pizza Night|Call Grandma|Gone Fishing|Feed the Cat|Be Home Soon|Eat the Plums
A sandwich board outside a florist shop with {} in curly handwriting
|Tulips Half Price|Roses Today|Say It With Dahlias|New Peonies|Two for One|Free Seeds|Wild Bouquets|Orchid Week"""

# ------------------------------------------------------------------------------------------------------------ objects in pictures

# Class names of COCO, as detectors give them.
CLASSES = """dog cat bird horse sheep cow elephant bear zebra giraffe backpack umbrella handbag tie suitcase frisbee
skateboard surfboard bottle cup fork knife spoon bowl banana apple sandwich orange broccoli carrot pizza donut cake chair
couch bed laptop book clock vase scissors bench bicycle car motorcycle airplane bus train truck boat"""
EXTRA = (
    "traffic light",
    "fire hydrant",
    "stop sign",
    "parking meter",
    "wine glass",
    "teddy bear",
    "cell phone",
    "potted plant",
)
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}
PLURALS = {"sheep": "sheep", "knife": "knives", "scissors": "scissors", "broccoli": "broccoli"}
# Kind of question -> how many for training and held out.
GENEVAL = {
    "single": (24, 9),
    "two": (36, 9),
    "counting": (36, 9),
    "colors": (28, 9),
    "position": (28, 9),
    "attribution": (28, 9),
}

# --------------------------------------------------------------------------------------------------------------- pleasing pictures

# Subjects | settings | manners, one block for each kind of picture. The last two subjects of each are held out.
CREATIVE = """\
a red fox; an old barn owl; a pair of sea otters; a snow leopard; a hummingbird; a sleeping tabby cat; a wild horse; a tree frog\
|in a birch forest after the first snow; at the edge of a misty lake; among tall summer grass; under a full moon\
|wildlife photography, shallow depth of field; loose watercolor; detailed ink drawing; golden hour, soft rim light
an elderly fisherman; a young violinist; a blacksmith; a girl with a paper crown; a desert nomad; a ballet dancer; \
a beekeeper; a night-shift nurse\
|beside a rain-streaked window; in a workshop full of tools; against a plain dark wall; in a narrow sunlit alley\
|oil portrait with visible brush strokes; black and white film photograph; studio portrait, soft key light; charcoal sketch
a terraced tea plantation; a volcanic beach; a valley of lavender; a frozen waterfall; a red canyon; an alpine meadow; \
a mangrove coast; a field of wind-bent barley\
|at sunrise with low fog; before a thunderstorm; under the northern lights; in late autumn\
|wide-angle landscape photograph; impressionist painting; woodblock print; minimal flat illustration
a spiral library; a floating market; a ruined abbey; a glass greenhouse; a lighthouse; a subway station; a desert observatory; \
a village of stilt houses\
|overgrown with ivy; during a heavy snowfall; lit by hundreds of lanterns; seen from far above\
|architectural photograph; isometric illustration; matte painting; pencil and wash drawing
a bowl of ramen; a stack of blueberry pancakes; a peach tart; a market stall of spices; a glass of iced tea; \
a loaf of sourdough; a plate of oysters; a basket of figs\
|on a weathered wooden table; on a marble counter by a window; on a picnic blanket; in a dim tavern\
|food photography, natural light; Dutch still life; gouache illustration; macro shot, steam and texture
a small dragon; a forest witch; a clockwork knight; a whale with a town on its back; a moon rabbit; a tree spirit; \
a cloud shepherd; a library ghost\
|guarding a candlelit bridge; drinking tea at a crooked table; crossing a sea of stars; asleep in a hollow oak\
|storybook illustration; intricate fantasy art, soft glow; stained glass; paper-cut diorama
a lone astronaut; a rusted robot gardener; a maglev train; an orbital city; a solar sail ship; a street-food drone; \
a deep-sea research base; a moon buggy\
|above a ringed planet; in a neon market at night; in a desert of salt; during a quiet snowfall\
|cinematic film still; retro science-fiction cover; clean concept art; long exposure photograph"""

# ------------------------------------------------------------------------------------------------------------------------- videos

# What happens, one line each; the last eight are held out.
VIDEO = """\
A golden retriever runs along a beach and splashes through shallow waves
A potter shapes a tall vase on a spinning wheel, wet clay between the fingers
A steam train crosses a stone viaduct and leaves a long white plume
A paper boat drifts down a rain gutter and turns around a leaf
A barista pours milk into an espresso and a rosette appears
A flock of starlings folds and stretches over a harbor
A skateboarder rolls down an empty street and jumps over a curb
A candle is blown out and its smoke curls upward
A woman in a yellow raincoat opens an umbrella and walks into the rain
Waves roll over black rocks and run back in white streams
A cat jumps from a bookshelf onto a sofa and stretches
A hot-air balloon lifts off from a field of sunflowers
Ink falls into a glass of water and spreads in slow clouds
A cyclist climbs a mountain road and disappears around a bend
A chef tosses vegetables in a wok and flames rise
Cherry petals fall onto a pond where koi swim in circles
A dancer in a red dress turns on an empty stage
Time passes over a city as clouds race and windows light up
A squirrel digs in the snow, finds a nut and runs off
A sailing boat heels in the wind and cuts through a swell
A child lets go of a balloon and watches it rise
A tram stops, its doors open, and people step out into fog
Lava flows slowly down a slope and crusts over
A drummer plays a fast roll while the cymbals shake
A jellyfish pulses upward through dark blue water
A windmill turns above a field of tulips as the light fades
A blacksmith strikes glowing iron and sparks scatter
Two foxes chase each other around a birch tree
A lantern is lit and sent floating down a river
Bread dough rises in a bowl beside a sunny window
A gymnast swings around a high bar and lands
Snow slides off a pine branch, which springs back up"""
CAMERAS = (
    "static camera",
    "slow tracking shot",
    "handheld close-up",
    "wide shot, slow zoom in",
    "low angle, slow motion",
)


def ocr() -> Iterator[tuple[bool, Row]]:
    lines = OCR.splitlines()
    for scene, texts in zip(lines[::2], lines[1::2], strict=True):
        words = texts.removeprefix("|").split("|")
        for number, text in enumerate(words):
            yield number >= len(words) - 3, {"prompt": scene.format(f'"{text}"'), "metadata": {"text": text}}


def geneval() -> Iterator[tuple[bool, Row]]:
    names, draw = [*CLASSES.split(), *EXTRA], random.Random("geneval")
    whole = [n for n in names if n not in ("scissors", "broccoli", "sheep")]  # where one and many sound alike
    pairs = [tuple(draw.sample((a, b), 2)) for a, b in product(names, names) if a < b and a not in b and b not in a]
    questions: dict[str, Sequence[tuple[Any, ...]]] = {
        "single": [(n,) for n in names],
        "two": pairs,
        "counting": list(product(whole, NUMBERS)),
        "colors": [(n, c) for n, c in product(names, COLORS) if n != c],
        "position": [(a, r, b) for (a, b), r in product(pairs, RELATIONS)],
        "attribution": [
            (a, x, b, y) for a, b in pairs for x, y in draw.sample(list(product(COLORS, COLORS)), 3) if x != y
        ],
    }
    for kind, (train, held_out) in GENEVAL.items():
        for number, asked in enumerate(draw.sample(list(questions[kind]), train + held_out)):
            text, metadata = question(kind, asked)
            yield number >= train, {"prompt": f"a photo of {text}", "metadata": {"tag": kind, **metadata}}


def question(kind: str, asked: tuple[Any, ...]) -> tuple[str, Row]:
    """The words of one question, and what must (not) be in the picture: GenEval's form."""
    if kind == "counting":
        name, count = asked
        thing = {"class": name, "count": count}
        return f"{NUMBERS[count]} {plural(name)}", {"include": [thing], "exclude": [{**thing, "count": count + 1}]}
    if kind == "position":
        a, relation, b = asked
        place = {"class": a, "count": 1, "position": [relation, 0]}
        return f"{one(a)} {relation} {one(b)}", {"include": [{"class": b, "count": 1}, place]}
    if kind in ("colors", "attribution"):
        things = [{"class": n, "count": 1, "color": c} for n, c in zip(asked[::2], asked[1::2], strict=True)]
        return " and ".join(one(thing["class"], thing["color"]) for thing in things), {"include": things}
    return " and ".join(one(name) for name in asked), {"include": [{"class": name, "count": 1} for name in asked]}


def one(name: str, color: str = "") -> str:
    """With its article."""
    words = f"{color} {name}".strip()
    if name == "scissors":
        return f"a pair of {words}"
    return (
        words
        if name == "broccoli"
        else f"{'an' if words[0] in 'aeiou' and not words.startswith('uni') else 'a'} {words}"
    )


def plural(name: str) -> str:
    if name in PLURALS:
        return PLURALS[name]
    return name + ("es" if name.endswith(("s", "ch", "sh")) else "s")


def creative() -> Iterator[tuple[bool, Row]]:
    draw = random.Random("creative")
    for block in CREATIVE.splitlines():
        subjects, settings, manners = ([x.strip() for x in part.split(";")] for part in block.split("|"))
        for number, subject in enumerate(subjects):
            for setting in draw.sample(settings, 3):
                words = f"{subject} {setting}, {draw.choice(manners)}"
                yield number >= len(subjects) - 2, {"prompt": words[0].upper() + words[1:]}


def video() -> Iterator[tuple[bool, Row]]:
    events = VIDEO.splitlines()
    for number, event in enumerate(events):
        for camera in CAMERAS:
            yield number >= len(events) - 8, {"prompt": f"{event}, {camera}"}


SETS = {"ocr": ocr, "geneval": geneval, "creative": creative, "video": video}


def write(folder: Path) -> list[Path]:
    """Write all sets into `folder`; returns the files."""
    files = []
    for name, rows in SETS.items():
        made = list(rows())
        for part, wanted in (("train", False), ("heldout", True)):
            lines = [json.dumps(row, ensure_ascii=False) for held_out, row in made if held_out is wanted]
            files.append(folder / f"{name}_{part}.jsonl")
            files[-1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return files


if __name__ == "__main__":
    for file in write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER):
        print(file.name, len(file.read_text(encoding="utf-8").splitlines()))
