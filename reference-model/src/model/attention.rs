//! Grouped-query attention with per-head norms, rotary positions and a key-value cache.

use candle_core::{Device, Tensor};
use checkpoint::{AttentionConfig, Checkpoint};

use super::LoadError;
use super::layers::{Linear, RmsNorm, Rotation, softmax};

#[derive(Debug, Clone)]
pub(super) struct Attention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    qk_norm: Option<(RmsNorm, RmsNorm)>,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
}

/// Keys and values of one layer, `[num_kv_heads, capacity, head_dim]`.
#[derive(Debug, Default)]
pub(super) struct LayerCache {
    tensors: Option<(Tensor, Tensor)>,
}

impl Attention {
    /// The tensors `{prefix}.{q,k,v,o}_proj`, and `{prefix}.{q,k}_norm` if the model has them.
    pub(super) fn load(
        checkpoint: &Checkpoint,
        prefix: &str,
        config: &AttentionConfig,
    ) -> Result<Self, LoadError> {
        let hidden = checkpoint.config().hidden;
        let &AttentionConfig { num_heads, num_kv_heads, head_dim, bias, .. } = config;
        let linear =
            |name: &str, shape| Linear::load(checkpoint, &format!("{prefix}.{name}"), shape, bias);
        let norm =
            |name: &str| RmsNorm::load(checkpoint, &format!("{prefix}.{name}.weight"), head_dim);
        Ok(Self {
            q: linear("q_proj", [num_heads * head_dim, hidden])?,
            k: linear("k_proj", [num_kv_heads * head_dim, hidden])?,
            v: linear("v_proj", [num_kv_heads * head_dim, hidden])?,
            o: linear("o_proj", [hidden, num_heads * head_dim])?,
            qk_norm: match config.qk_norm {
                true => Some((norm("q_norm")?, norm("k_norm")?)),
                false => None,
            },
            num_heads,
            num_kv_heads,
            head_dim,
        })
    }

    /// `[num, hidden]` to `[num, hidden]` for `num` tokens from position `first` on. The cache
    /// holds `first` positions before, and `first + num` afterwards; `mask` is
    /// `[num, first + num]`, or absent for a single token, which sees everything.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        first: usize,
        rotation: &Rotation,
        mask: Option<&Tensor>,
        cache: &mut LayerCache,
    ) -> candle_core::Result<Tensor> {
        let num = x.dim(0)?;
        let Self { num_heads, num_kv_heads, head_dim, .. } = *self;
        let mut q = self.q.forward(x)?.reshape((num, num_heads, head_dim))?;
        let mut k = self.k.forward(x)?.reshape((num, num_kv_heads, head_dim))?;
        let v = self.v.forward(x)?.reshape((num, num_kv_heads, head_dim))?;
        if let Some((q_norm, k_norm)) = &self.qk_norm {
            q = q_norm.forward(&q)?;
            k = k_norm.forward(&k)?;
        }
        let q = rotation.apply(&q.transpose(0, 1)?)?;
        let k = rotation.apply(&k.transpose(0, 1)?)?;
        let (k, v) = cache.store(&k, &v.transpose(0, 1)?.contiguous()?, first)?;

        // Query heads of one group are neighbours: stacked, they share one product per key head.
        let group = num_heads / num_kv_heads;
        let q = q.reshape((num_kv_heads, group * num, head_dim))?;
        let scores = (q.matmul(&k.t()?)? * (head_dim as f64).powf(-0.5))?;
        let scores = match mask {
            Some(mask) => scores
                .reshape((num_kv_heads, group, num, first + num))?
                .broadcast_add(mask)?
                .reshape((num_kv_heads, group * num, first + num))?,
            None => scores,
        };
        let mixed = softmax(&scores)?.matmul(&v)?;
        let mixed = mixed.reshape((num_heads, num, head_dim))?.transpose(0, 1)?;
        self.o.forward(&mixed.contiguous()?.reshape((num, num_heads * head_dim))?)
    }
}

impl LayerCache {
    /// Writes `k` and `v` `[num_kv_heads, num, head_dim]` at position `first` and returns all
    /// positions up to theirs.
    fn store(
        &mut self,
        k: &Tensor,
        v: &Tensor,
        first: usize,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        let (num_kv_heads, num, head_dim) = k.dims3()?;
        let needed = first + num;
        let capacity = self.tensors.as_ref().map_or(Ok(0), |(k, _)| k.dim(1))?;
        if needed > capacity {
            let shape = (num_kv_heads, needed.next_power_of_two().max(MIN_CAPACITY), head_dim);
            let grow = |old: Option<&Tensor>| {
                let new = Tensor::zeros(shape, k.dtype(), &Device::Cpu)?;
                if let Some(old) = old
                    && first > 0
                {
                    new.slice_set(&old.narrow(1, 0, first)?.contiguous()?, 1, 0)?;
                }
                candle_core::Result::Ok(new)
            };
            let old = self.tensors.as_ref();
            self.tensors = Some((grow(old.map(|(k, _)| k))?, grow(old.map(|(_, v)| v))?));
        }
        let Some((keys, values)) = &self.tensors else {
            candle_core::bail!("a cache for {needed} positions has no memory")
        };
        keys.slice_set(&k.contiguous()?, 1, first)?;
        values.slice_set(v, 1, first)?;
        Ok((keys.narrow(1, 0, needed)?, values.narrow(1, 0, needed)?))
    }
}

/// Initial capacity of a cache, in positions.
const MIN_CAPACITY: usize = 64;
