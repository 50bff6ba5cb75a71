"""Makes a tiny Qwen-Image pipeline from nothing: draws captioned shapes, trains an autoencoder and a transformer on them.

    uv run python tools/make_tiny_model --out DIR                  about 7 minutes on one H100
    uv run python tools/make_tiny_model --evaluate DIR             accuracies of a folder, made here or elsewhere

The result is a folder that the stock `diffusers.QwenImagePipeline.from_pretrained` loads. Its captions are wrong about half
of the time by construction, so that reinforcement learning against the `shapes` reward has something to repair.
"""
