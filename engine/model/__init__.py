"""How logits come out: loading, paged attention, the forward pass, sampling. Imports torch and transformers."""
