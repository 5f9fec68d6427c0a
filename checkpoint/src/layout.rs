//! The place of routed experts in a checkpoint.

use std::collections::BTreeSet;

/// The names under which the experts of all layers are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Prefix before `layers.`, with its closing dot if it is not empty.
    pub root: &'static str,
    /// Prefix behind `layers.N.`, with its closing dot if it is not empty.
    pub block: &'static str,
    /// How the matrices are split into tensors.
    pub stored: Stored,
}

/// How the matrices of a layer's experts are split into tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// One tensor for each matrix of each expert: `experts.E.<name>.weight`.
    PerExpert {
        /// Names of the gate, up and down matrices.
        names: [&'static str; 3],
    },
    /// One tensor for gate and up of all experts, one for down of all.
    Fused {
        /// Name of the tensor with gate and up, behind the block's prefix.
        gate_up: &'static str,
        /// Name of the tensor with down.
        down: &'static str,
    },
}

impl Layout {
    /// Finds the layout in the names of all tensors, and the layers that have experts in it, ascending. `None` if no
    /// tensor is an expert's under a known name.
    ///
    /// Several may exist, for example where a multi-modal model has a second decoder. Roots and blocks that come
    /// first in their lists win.
    pub fn find<'a>(
        names: impl Iterator<Item = &'a str>,
        num_layers: u32,
    ) -> Option<(Layout, Vec<u32>)> {
        let mut best: Option<(usize, Layout, BTreeSet<u32>)> = None;
        for name in names {
            let Some((root, layer, rest)) = split(name) else { continue };
            let root_rank = ROOTS.iter().position(|known| *known == root);
            let Some(root_rank) = root_rank.filter(|_| layer < num_layers) else { continue };
            let block_rank = BLOCKS.iter().position(|block| {
                rest.strip_prefix(block).is_some_and(|tail| stored(tail).is_some())
            });
            let Some(block_rank) = block_rank else { continue };
            let (root, block) = (ROOTS[root_rank], BLOCKS[block_rank]);
            let Some(stored) = rest.strip_prefix(block).and_then(stored) else { continue };
            let layout = Layout { root, block, stored };
            let rank = root_rank * BLOCKS.len() + block_rank;
            match &mut best {
                Some((found, kept, layers)) if *found == rank && *kept == layout => {
                    layers.insert(layer);
                }
                Some((found, ..)) if *found <= rank => {}
                _ => best = Some((rank, layout, BTreeSet::from([layer]))),
            }
        }
        best.map(|(_, layout, layers)| (layout, layers.into_iter().collect()))
    }

    /// The prefix of a layer's block, `model.layers.3.mlp.` for example.
    pub fn block_of(&self, layer: u32) -> String {
        format!("{}layers.{layer}.{}", self.root, self.block)
    }

    /// The prefix of a layer, `model.layers.3.` for example.
    pub fn layer(&self, layer: u32) -> String {
        format!("{}layers.{layer}.", self.root)
    }

    /// Returns the layer of a tensor that belongs to routed experts, with their scales and biases.
    pub fn layer_of_expert_tensor(&self, name: &str) -> Option<u32> {
        let (root, layer, rest) = split(name)?;
        let tail = rest.strip_prefix(self.block).filter(|_| root == self.root)?;
        let is_experts = match self.stored {
            Stored::PerExpert { .. } => expert_number(tail).is_some(),
            Stored::Fused { gate_up, down } => {
                [gate_up, down].iter().any(|fused| tail.starts_with(fused))
            }
        };
        is_experts.then_some(layer)
    }
}

/// Splits `<root>layers.<number>.<rest>`.
fn split(name: &str) -> Option<(&str, u32, &str)> {
    const WORD: &str = "layers.";
    let start = match name.starts_with(WORD) {
        true => 0,
        false => name.find(".layers.")? + 1,
    };
    let behind = &name[start + WORD.len()..];
    let (number, rest) = behind.split_once('.')?;
    Some((&name[..start], number.parse().ok()?, rest))
}

/// The number in `experts.<number>.…`, and what follows it.
fn expert_number(tail: &str) -> Option<(u32, &str)> {
    let (number, rest) = tail.strip_prefix("experts.")?.split_once('.')?;
    Some((number.parse().ok()?, rest))
}

fn stored(tail: &str) -> Option<Stored> {
    if let Some((_, rest)) = expert_number(tail) {
        let (name, _) = rest.split_once('.')?;
        let names = MATRICES.iter().find(|names| names.contains(&name))?;
        return Some(Stored::PerExpert { names: *names });
    }
    let fused = FUSED.iter().find(|(gate_up, _)| {
        tail.strip_prefix(gate_up).is_some_and(|suffix| matches!(suffix, "" | "_blocks"))
    });
    fused.map(|&(gate_up, down)| Stored::Fused { gate_up, down })
}

/// Prefixes before `layers.` in published checkpoints, most common first.
pub(crate) const ROOTS: &[&str] = &[
    "model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "backbone.",
    "thinker.model.",
    "model.llm.",
    "",
];
/// Prefixes behind `layers.N.`.
const BLOCKS: &[&str] =
    &["mlp.", "block_sparse_moe.", "feed_forward.", "ffn.", "mixer.", "moe.", ""];
/// Names of an expert's gate, up and down matrices.
const MATRICES: &[[&str; 3]] = &[["gate_proj", "up_proj", "down_proj"], ["w1", "w3", "w2"]];
/// Names of fused tensors: gate and up, down.
const FUSED: &[(&str, &str)] = &[
    ("experts.gate_up_proj", "experts.down_proj"),
    ("experts.gate_up_proj.weight", "experts.down_proj.weight"),
    ("experts.w13_weight", "experts.w2_weight"),
    ("experts.fc1.weight", "experts.fc2.weight"),
    ("input_linear.weight", "output_linear.weight"),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn find(names: &[&str]) -> Option<(Layout, Vec<u32>)> {
        Layout::find(names.iter().copied(), 4)
    }

    #[test]
    fn layouts_of_published_checkpoints_are_found() {
        let cases: &[(&str, &str, &str, bool)] = &[
            ("model.layers.1.mlp.experts.0.up_proj.weight", "model.", "mlp.", false),
            ("model.layers.1.mlp.experts.7.down_proj.qweight", "model.", "mlp.", false),
            (
                "model.layers.1.block_sparse_moe.experts.0.w3.weight",
                "model.",
                "block_sparse_moe.",
                false,
            ),
            ("model.layers.1.mlp.experts.0.w2.weight", "model.", "mlp.", false),
            ("backbone.layers.1.mixer.experts.3.up_proj.weight", "backbone.", "mixer.", false),
            ("layers.1.experts.0.w1.weight", "", "", false),
            (
                "model.language_model.layers.1.mlp.experts.gate_up_proj",
                "model.language_model.",
                "mlp.",
                true,
            ),
            ("model.layers.1.mlp.experts.gate_up_proj_blocks", "model.", "mlp.", true),
            ("model.layers.1.feed_forward.experts.gate_up_proj", "model.", "feed_forward.", true),
            ("model.layers.1.experts.gate_up_proj", "model.", "", true),
            (
                "model.layers.1.block_sparse_moe.input_linear.weight",
                "model.",
                "block_sparse_moe.",
                true,
            ),
        ];
        for (name, root, block, fused) in cases {
            let (layout, layers) = find(&[name]).unwrap_or_else(|| panic!("{name}"));
            assert_eq!((layout.root, layout.block, layers), (*root, *block, vec![1]), "{name}");
            assert_eq!(matches!(layout.stored, Stored::Fused { .. }), *fused, "{name}");
            assert_eq!(layout.layer_of_expert_tensor(name), Some(1), "{name}");
        }
    }

    #[test]
    fn other_tensors_are_no_experts() {
        let others = [
            "model.layers.0.mlp.gate.weight",
            "model.layers.0.mlp.shared_experts.up_proj.weight",
            "model.layers.0.mlp.experts.e_score_correction_bias",
            "mtp.layers.0.mlp.experts.0.up_proj.weight",
            "model.layers.4.mlp.experts.0.up_proj.weight",
            "talker.model.layers.0.mlp.experts.0.up_proj.weight",
        ];
        assert_eq!(find(&others), None);
    }

    #[test]
    fn the_text_models_decoder_wins_over_others() {
        let names = [
            "layers.0.mlp.experts.0.up_proj.weight",
            "model.layers.2.mlp.experts.0.up_proj.weight",
            "model.layers.3.mlp.experts.0.up_proj.weight",
        ];
        let (layout, layers) = find(&names).unwrap();
        assert_eq!((layout.root, layers), ("model.", vec![2, 3]));
    }
}
