"""`ModelSpec`: everything that training and sampling must know about one architecture. Imports without torch.

Training and the rollout call the same `velocity`, so on-policy log-probs agree to the bit; a test per architecture
holds it to what the stock diffusers pipeline computes.

Shapes: B samples, S tokens, C channels, T frames, H W. Notation: sigma in [0, 1], x = (1 - sigma) * clean + sigma *
noise, and the velocity points from clean to noise, so a step is x + (sigma_next - sigma) * velocity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from .common import compute_dtype, config_of, pack, split_batch, to_uint8, unpack
from .errors import SpecError
from .folders import component, empty_diffusers, has_part, load_diffusers, load_part, read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .embeddings import PromptEmbeds, PromptEncoder

JOINT_ATTENTION = (
    "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
)  # fmt: skip
"""Linear modules of an attention over image and text together."""
JOINT_MLP = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")


class Sampling(Protocol):
    """What a network must know of how its samples are drawn. `sde_samplers.SamplerSettings` is one; so is any object with these."""

    @property
    def height(self) -> int:
        """Pixels."""

    @property
    def width(self) -> int:
        """Pixels."""

    @property
    def num_frames(self) -> int:
        """Frames of the video, 1 for images."""

    @property
    def true_cfg_scale(self) -> float | tuple[float, float]:
        """Weight w of classifier-free guidance, negative + w * (positive - negative); 1 is off. A pair: one for each expert."""

    @property
    def guidance_scale(self) -> float | None:
        """The number fed into networks that were distilled with guidance (FLUX.1-dev), else None."""


class ModelSpec(ABC):
    """One architecture. Subclass it, set the class attributes, and name the class in the config or in an entry point.

    Args:
        folder: a pipeline folder whose configs replace the defaults of the published full-size model (sizes, number of
            latent channels, VAE factors). `get_spec_for(folder)` passes it, `get_spec(name)` does not.
    """

    name: ClassVar[str]
    """Short name, e.g. "qwen_image"."""
    transformer_class: ClassVar[str]
    """Class name in diffusers."""
    pipeline_class: ClassVar[str]
    """Class name of the stock text-to-image (or video) pipeline."""
    vae_class: ClassVar[str] = "AutoencoderKL"
    """Class name of the autoencoder."""
    text_parts: ClassVar[tuple[str, ...]] = ("tokenizer", "text_encoder")
    """Tokenizers and text encoders of the folder, without which there is no prompt."""
    optional_text_parts: ClassVar[tuple[str, ...]] = ()
    """Those that a folder may lack."""
    solvers: ClassVar[tuple[str, ...]] = ()
    """Multistep schedulers that its folders may name, beside `FlowMatchEulerDiscreteScheduler`."""
    attention_targets: tuple[str, ...] = JOINT_ATTENTION
    """Suffixes of the attention Linear modules, as peft's `target_modules` takes them."""
    mlp_targets: tuple[str, ...] = JOINT_MLP
    """Suffixes of the MLP Linear modules."""
    default_max_sequence_length: ClassVar[int] = 512
    """Prompt tokens, when the caller gives no number (the stock pipeline's default)."""
    limit: ClassVar[int] = 512
    """The largest `max_sequence_length`."""
    pads_text: ClassVar[int | None] = None
    """Tokens beside `max_sequence_length` to which every prompt is filled up; None where a prompt keeps its own length."""
    packed: ClassVar[bool] = False
    """Every 2x2 patch of the latent is one token: [S, 4C] in place of [C, H/f, W/f]."""
    guides_in_one_forward: ClassVar[bool] = False
    """Under guidance both predictions come from one forward of twice the rows, as in the stock pipeline."""
    lora_names: ClassVar[str] = "any"
    """Which map of `lora_sync` has its layers' names in other tools and in the engine; "any" keeps the names as they are."""
    engine_pipeline: ClassVar[str] = ""
    """ "module:Class" of the pipeline that samples it in vLLM-Omni; empty when there is none."""
    engine_stepwise_pipeline: ClassVar[str] = ""
    """The same for an engine that schedules step by step."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.transformer_config: Mapping[str, Any] = self._read("transformer/config.json")
        self.vae_config: Mapping[str, Any] = self._read("vae/config.json")
        self.scheduler_config: Mapping[str, Any] = self._read("scheduler/scheduler_config.json")
        self.pipeline_config: Mapping[str, Any] = self._read("model_index.json")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.folder is None else str(self.folder)!r})"

    def _read(self, name: str) -> Mapping[str, Any]:
        file = None if self.folder is None else self.folder / name
        return read_json(file) if file is not None and file.is_file() else {}

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """All attention and MLP Linear modules of the blocks: the default of a LoRA here."""
        return self.attention_targets + self.mlp_targets

    # ------------------------------------------------------------------ loading

    def load_transformer(
        self, path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> nn.Module:
        """The transformer of a pipeline folder, in eval mode, with gradients on; fp32 unless a dtype is given."""
        folders = self.transformer_folders(path).values()
        return self.joined(path, [load_diffusers(self.transformer_class, one, dtype, device) for one in folders])

    def empty_transformer(self, path: str | Path, dtype: torch.dtype | None = None) -> nn.Module:
        """The transformer with its parameters on the meta device and its tables (buffers, rotary angles) real.

        For loading shard by shard, from the files in `transformer_folders`.
        """
        folders = self.transformer_folders(path).values()
        return self.joined(path, [empty_diffusers(self.transformer_class, one, dtype) for one in folders])

    def joined(self, path: str | Path, parts: list[nn.Module]) -> nn.Module:
        """One module of the networks in `transformer_folders`."""
        return parts[0]

    def transformer_folders(self, path: str | Path) -> dict[str, Path]:
        """Where the weights of `load_transformer`'s module lie: parameter-name prefix to folder of safetensors."""
        return {"": component(path, "transformer", "config.json")}

    def load_vae(
        self, path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> nn.Module:
        """The autoencoder of a pipeline folder, in eval mode and frozen."""
        vae = load_diffusers(self.vae_class, component(path, "vae", "config.json"), dtype, device)
        return vae.requires_grad_(False)

    def load_scheduler(self, path: str | Path) -> Any:
        """The scheduler of a pipeline folder, of the class that its config names."""
        import diffusers

        folder = component(path, "scheduler", "scheduler_config.json")
        name = str(read_json(folder / "scheduler_config.json").get("_class_name"))
        if not hasattr(diffusers, name):
            raise SpecError(f"{str(folder)!r} names the scheduler {name!r}, which diffusers does not have.")
        return getattr(diffusers, name).from_pretrained(folder)

    # ------------------------------------------------------------------ prompts

    def load_encoder(
        self, path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> PromptEncoder:
        """The text encoder(s) and tokenizer(s) of a pipeline folder, frozen, behind a cache."""
        from .embeddings import PromptEncoder

        spec = type(self)(path)
        names = (*self.text_parts, *(part for part in self.optional_text_parts if has_part(path, part)))

        def encode(parts: Mapping[str, Any], prompt: str, length: int) -> tuple[Tensor, Tensor | None]:
            spec.check_prompt(parts, prompt, length)
            return spec.encode_prompt(parts, prompt, length)

        return PromptEncoder(
            lambda: {part: load_part(path, part, dtype, device) for part in names},
            encode,
            device,
            max_sequence_length=self.default_max_sequence_length,
            limit=self.limit,
        )

    def prompt_check(self, path: str | Path) -> Callable[[str, int], None]:
        """A function (prompt, max_sequence_length) that raises PromptTooLongError where the encoder would, with the tokenizers of a
        pipeline folder alone: no weights are read."""
        names = [part for part in (*self.text_parts, *self.optional_text_parts) if part.startswith("tokenizer")]
        tokenizers = {part: load_part(path, part, None, "cpu") for part in names if has_part(path, part)}
        return lambda prompt, length: self.check_prompt(tokenizers, prompt, length)

    def check_prompt(self, tokenizers: Mapping[str, Any], prompt: str, max_sequence_length: int) -> None:  # noqa: B027  (a spec need not say)
        """Raise PromptTooLongError for a prompt that the encoder cannot read to its end; `tokenizers` by the name of their part."""

    @abstractmethod
    def encode_prompt(
        self, parts: Mapping[str, Any], prompt: str, max_sequence_length: int
    ) -> tuple[Tensor, Tensor | None]:
        """Embed one prompt that `check_prompt` has passed, with the loaded `text_parts`: ([s, C], pooled [C'] or None)."""

    # ------------------------------------------------------------------ shapes and schedule

    @property
    def vae_factor(self) -> int:
        """Pixels per latent cell, along height and width."""
        return int(2 ** (len(self.vae_config.get("block_out_channels", (128, 256, 512, 512))) - 1))

    @property
    def latent_channels(self) -> int:
        """Channels of the latent before packing."""
        cells = 4 if self.packed else 1
        return int(self.transformer_config.get("in_channels", 16 * cells)) // cells

    @property
    def size_multiple(self) -> int:
        """Height and width must be multiples of this many pixels: two latent cells, one patch."""
        return 2 * self.vae_factor

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Shape of one sample's latent, as `velocity` and trajectories hold it (no batch axis).

        Raises:
            SpecError: a size that is not a multiple of `size_multiple`, or a number of frames that does not fit.
        """
        self.check_size(height, width, num_frames)
        if self.packed:
            return self.patches(height, width), 4 * self.latent_channels
        return self.latent_channels, height // self.vae_factor, width // self.vae_factor

    def patches(self, height: int, width: int) -> int:
        """2x2 patches of a picture's latent: image tokens of most networks."""
        return (height // self.size_multiple) * (width // self.size_multiple)

    def check_size(self, height: int, width: int, num_frames: int = 1) -> None:
        """Raise SpecError for a size that the stock pipeline would round."""
        multiple = self.size_multiple
        if height < multiple or width < multiple or height % multiple or width % multiple:
            near = [max(multiple, round(side / multiple) * multiple) for side in (height, width)]
            raise SpecError(
                f"{height}x{width} pixels do not fit {self.name}: height and width must be multiples of {multiple}. "
                f"The nearest size is {near[0]}x{near[1]}."
            )
        if num_frames != 1:
            raise SpecError(f"{self.name} makes single images, num_frames={num_frames!r} must be 1.")

    def check_latents(self, latents: Tensor, height: int, width: int, num_frames: int = 1) -> None:
        """Raise SpecError when the latents do not have `latent_shape`."""
        expected = self.latent_shape(height, width, num_frames)
        if tuple(latents.shape[1:]) != expected:
            raise SpecError(
                f"Latents {tuple(latents.shape)} do not fit {height}x{width} pixels and {num_frames} frame(s): "
                f"{self.name} needs [B, {', '.join(map(str, expected))}]."
            )

    def schedule_kwargs(
        self, scheduler: Any, num_steps: int, height: int, width: int, num_frames: int = 1
    ) -> dict[str, Any]:
        """What the stock pipeline passes to `scheduler.set_timesteps` beside the number of steps (`mu`, `sigmas`)."""
        return {}

    # ------------------------------------------------------------------ the network

    def velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        cond: PromptEmbeds,
        settings: Sampling,
        negative: PromptEmbeds | None = None,
    ) -> Tensor:
        """Velocity at `sigma`, with gradient.

        Args:
            transformer: the network, perhaps with peft adapters, perhaps sharded by FSDP2.
            latents: [B, ...] fp32, the shape of `latent_shape`. Cast to the transformer's dtype inside.
            sigma: [B] fp32 in [0, 1].
            cond: the prompts, one row per sample or one for all.
            settings: size and guidance.
            negative: the negative prompts; used when `settings.true_cfg_scale` asks for guidance.

        Returns:
            [B, ...] fp32.

        Raises:
            SpecError: shapes that do not fit, or guidance without what it needs.
        """
        self.check_latents(latents, settings.height, settings.width, settings.num_frames)
        batch = latents.shape[0]
        if sigma.shape != (batch,):
            raise SpecError(f"sigma {tuple(sigma.shape)} must be [{batch}], one number per sample.")
        x, asked = latents.to(compute_dtype(transformer)), settings.true_cfg_scale
        scale = self.guidance_weight(transformer, sigma, asked)
        if (max(asked) if isinstance(asked, tuple) else asked) <= 1:
            return self.predict(transformer, x, sigma, cond.expand(batch), settings)
        if negative is None:
            raise SpecError(
                f"true_cfg_scale={asked!r} needs negative prompts and got none: encode a negative prompt "
                "(an empty one will do) or set true_cfg_scale=1."
            )
        if self.guides_in_one_forward:
            both = negative.cat([negative.expand(batch), cond.expand(batch)])
            twice = x.repeat(2, *[1] * (x.ndim - 1)), sigma.repeat(2)
            other, positive = self.predict(transformer, *twice, both, settings).chunk(2)
        else:
            positive = self.predict(transformer, x, sigma, cond.expand(batch), settings)
            other = self.predict(transformer, x, sigma, negative.expand(batch), settings)
        return self.guide(positive, other, scale)

    @abstractmethod
    def predict(
        self, transformer: nn.Module, x: Tensor, sigma: Tensor, prompts: PromptEmbeds, settings: Sampling
    ) -> Tensor:
        """One forward of the network: the velocity without guidance, [B, ...] fp32.

        `x` are the latents in the network's dtype, `prompts` has one row per sample; the others are as in `velocity`.
        """

    def guidance_weight(
        self, transformer: nn.Module, sigma: Tensor, scale: float | tuple[float, float]
    ) -> float | Tensor:
        """The weight of guidance, for the batch or for each sample; SpecError for a pair, where there are no two experts."""
        if isinstance(scale, tuple):
            raise SpecError(f"true_cfg_scale={scale!r}: a pair is for a folder with two experts.")
        return scale

    def guide(self, positive: Tensor, other: Tensor, scale: float | Tensor) -> Tensor:
        """Classifier-free guidance from two predictions."""
        return other + scale * (positive - other)

    def stock_guidance(self, settings: Sampling) -> float | tuple[float, float] | None:
        """What the stock pipeline, and an engine that follows it, calls `guidance_scale` under these settings."""
        return settings.true_cfg_scale

    def decode(self, vae: nn.Module, latents: Tensor, *, height: int, width: int, num_frames: int = 1) -> Tensor:
        """Clean latents [B, ...] to pixels, no gradient: uint8 [B, 3, H, W], or [B, T, 3, H, W] for T > 1 frames."""
        import torch

        self.check_latents(latents, height, width, num_frames)
        done = []
        with torch.no_grad():
            for part in split_batch(latents, height * width * num_frames):
                cells = unpack(part, height // self.vae_factor, width // self.vae_factor) if self.packed else part
                done.append(to_uint8(self.pixels(vae, cells)))
        return torch.cat(done).contiguous()

    def pixels(self, vae: Any, latents: Tensor) -> Tensor:
        """Unpacked latents to [B, 3, H, W] or [B, T, 3, H, W] in [-1, 1]. Here: by an `AutoencoderKL`."""
        scale, shift = vae.config.scaling_factor, vae.config.shift_factor or 0.0
        picture: Tensor = vae.decode((latents.float() / scale + shift).to(vae.dtype), return_dict=False)[0]
        return picture

    def encode(self, vae: nn.Module, pixels: Tensor) -> Tensor:
        """Pixels as `decode` gives them, uint8 [B, 3, H, W] or [B, T, 3, H, W], to clean latents [B, ...] fp32, no gradient:
        the mode of what the autoencoder says, so the same picture always gives the same latents."""
        import torch

        height, width = pixels.shape[-2:]
        num_frames = pixels.shape[1] if pixels.ndim == 5 else 1
        self.check_size(height, width, num_frames)
        weight, done = next(vae.parameters()), []
        with torch.no_grad():
            for part in split_batch(pixels, height * width * num_frames):
                cells = self.cells(vae, part.to(weight.device).float().div(127.5).sub(1.0).to(weight.dtype)).float()
                done.append(pack(cells) if self.packed else cells)
        return torch.cat(done)

    def cells(self, vae: Any, pixels: Tensor) -> Tensor:
        """The inverse of `pixels`. Here: by an `AutoencoderKL`."""
        scale, shift = vae.config.scaling_factor, vae.config.shift_factor or 0.0
        return (vae.encode(pixels).latent_dist.mode().float() - shift) * scale

    def flops(self, config: Mapping[str, Any], batch: int, settings: Sampling, text_tokens: int) -> float:
        """Operations of one forward of the transformer (one prediction: double it under true guidance).

        Args:
            config: the transformer's config, `transformer.config` or the content of its config.json. Fields that are
                missing take the published full-size model's value.
            batch: samples; settings: size; text_tokens: prompt tokens with padding.
        """
        raise SpecError(f"{self.name} has no count of operations: implement `flops` in {type(self).__name__}.")

    # ------------------------------------------------------------------ helpers for subclasses

    def embedded_guidance(self, transformer: nn.Module, sigma: Tensor, settings: Sampling) -> Tensor | None:
        """The guidance [B] that a distilled network takes as an input, None for another; SpecError when none was given."""
        if not config_of(transformer).guidance_embeds:
            return None
        if settings.guidance_scale is None:
            raise SpecError(
                f"This {self.name} network was distilled with guidance and got guidance_scale=None: give a number "
                "(FLUX.1-dev was published with 3.5)."
            )
        return sigma.float().new_full(sigma.shape, settings.guidance_scale)

    def unpadded(self, prompts: PromptEmbeds) -> PromptEmbeds:
        """The prompts, or SpecError if a row has padding: for networks without a text mask, which would attend to it."""
        if not prompts.full:
            raise SpecError(
                f"{self.name} has no text mask and got prompt rows with padding, {prompts.mask.sum(1).tolist()} of "
                f"{prompts.mask.shape[1]} tokens: encode all of a batch with one max_sequence_length."
            )
        return prompts

    def pooled_of(self, prompts: PromptEmbeds) -> Tensor:
        """The pooled vectors [B, C], or SpecError for an architecture that cannot do without."""
        if prompts.pooled is None:
            raise SpecError(f"{self.name} needs pooled prompt vectors: encode the prompts with spec.load_encoder(...).")
        return prompts.pooled
