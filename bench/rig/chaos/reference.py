"""The answers of an undisturbed pipeline, with which all others are compared."""

import asyncio
from collections.abc import Sequence

from bench.rig.chaos.load import Caller, follow
from bench.rig.chaos.recipes import Recipe
from bench.rig.chaos.stories import Story
from bench.rig.chaos.verdict import Model, check_reference

_NUM_AT_ONCE = 8  # requests


async def undisturbed(caller: Caller, recipes: Sequence[Recipe], model_seed: int = 0) -> Model:
    """Sends each recipe once.

    Raises:
        SystemExit: an answer is not what the model computes.
    """
    turns = asyncio.Semaphore(_NUM_AT_ONCE)

    async def one(recipe: Recipe) -> Story:
        async with turns:
            return await follow(recipe, caller)

    stories = await asyncio.gather(*map(one, recipes))
    for story in stories:
        if why := check_reference(story, model_seed):
            raise SystemExit(f"undisturbed, a {story.recipe.kind} request is wrong already: {why}")
    return Model(model_seed, dict(zip(recipes, stories, strict=True)))
