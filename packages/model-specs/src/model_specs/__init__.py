"""What a trainer or a sampler must know about one diffusers architecture, one file each."""
