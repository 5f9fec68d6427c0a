//! Experts and routers by layer, independent of the family's tensor names and the checkpoint's format.

mod linear;
mod router;

use crate::family::SharedRule;
use crate::layout::{Layout, Stored};
use crate::open::Checkpoint;
use crate::tensor::{PLAIN_FLOATS, TensorError, TensorView};
use crate::weight::WeightView;
use linear::Place;
pub use router::RouterTensors;

/// The matrices of one expert. Its arithmetic is in [`ModelConfig::arithmetic`](crate::ModelConfig::arithmetic).
#[derive(Debug, Clone)]
pub struct ExpertTensors<'a> {
    /// `[width, hidden]`; `None` if the activation has no gate.
    pub gate: Option<WeightView<'a>>,
    /// `[width, hidden]`.
    pub up: WeightView<'a>,
    /// `[hidden, width]`.
    pub down: WeightView<'a>,
    /// Added to the matrices' outputs, if the checkpoint has them.
    pub biases: Option<ExpertBiases>,
}

/// Biases of an expert's matrices.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertBiases {
    /// `[width]`; empty if the activation has no gate.
    pub gate: Vec<f32>,
    /// `[width]`.
    pub up: Vec<f32>,
    /// `[hidden]`.
    pub down: Vec<f32>,
}

impl<'a> ExpertTensors<'a> {
    /// The matrices: gate if there is one, up, down.
    pub fn matrices(&self) -> impl Iterator<Item = &WeightView<'a>> {
        self.gate.iter().chain([&self.up, &self.down])
    }

    /// Bytes of all matrices and biases in the form for computing.
    #[must_use]
    pub fn computing_bytes(&self) -> usize {
        let biases = self
            .biases
            .as_ref()
            .map_or(0, |b| (b.gate.len() + b.up.len() + b.down.len()) * size_of::<f32>());
        self.matrices().map(WeightView::computing_bytes).sum::<usize>() + biases
    }
}

impl Checkpoint {
    /// The matrices of one routed expert, with checked shapes, dtypes and scales.
    ///
    /// # Errors
    /// [`TensorError`] that names the layer, the expert or the tensor at fault.
    pub fn expert(&self, layer: u32, expert: u32) -> Result<ExpertTensors<'_>, TensorError> {
        self.check_moe_layer(layer)?;
        let config = self.config();
        if expert >= config.num_experts {
            return Err(TensorError::NoSuchExpert { expert, num_experts: config.num_experts });
        }
        let layout = self.layout_of(layer)?;
        let block = layout.block_of(layer);
        match layout.stored {
            Stored::PerExpert { names } => self.single_expert(
                &format!("{block}experts.{expert}"),
                names,
                [config.moe_intermediate, config.hidden],
            ),
            Stored::Fused { gate_up, down } => {
                self.fused_expert(&format!("{block}{gate_up}"), &format!("{block}{down}"), expert)
            }
        }
    }

    /// Returns true if the codes of a routed expert are in the system's page cache, so that reading them does not wait
    /// for the disk. Returns false if the expert cannot be read, or if the file system cannot tell. Looks at samples.
    #[must_use]
    pub fn is_expert_cached(&self, layer: u32, expert: u32) -> bool {
        let Ok(tensors) = self.expert(layer, expert) else { return false };
        tensors.matrices().all(|matrix| {
            let file = self.stored(matrix.tensor.name);
            file.is_some_and(|(file, _)| file.is_cached(matrix.stored_codes()))
        })
    }

    /// The shared expert, which processes every token; `None` if the model has none.
    ///
    /// # Errors
    /// [`TensorError`] that names the layer or the tensor at fault. Shared experts that the router weighs one by one
    /// are no single expert: take [`weighted_shared_experts`](Self::weighted_shared_experts).
    pub fn shared_expert(&self, layer: u32) -> Result<Option<ExpertTensors<'_>>, TensorError> {
        self.check_moe_layer(layer)?;
        let config = self.config();
        let Some(SharedRule { path, stacked, .. }) = config.family.shared.as_ref() else {
            return Ok(None);
        };
        if config.shared_width == 0 {
            return Ok(None);
        }
        let prefix = format!("{}{path}", self.layer_prefix(layer));
        if stacked.is_some() {
            return Err(TensorError::Format {
                name: prefix,
                found: format!("has {} experts with factors", config.num_weighted_shared),
                expected: "one MLP without a factor".to_owned(),
            });
        }
        if self.contains(&format!("{prefix}.input_linear.weight")) {
            return self.fused_shared_expert(&prefix, config.shared_width).map(Some);
        }
        let names = match self.contains(&format!("{prefix}.w1.weight")) {
            true => ["w1", "w3", "w2"],
            false => ["gate_proj", "up_proj", "down_proj"],
        };
        let sizes = [config.shared_width, config.model_hidden];
        self.single_expert(&prefix, names, sizes).map(Some)
    }

    /// The shared experts that the router weighs one by one, with the factors that follow those of the routed experts.
    /// Empty for models whose shared experts are one MLP, and for models without.
    ///
    /// # Errors
    /// [`TensorError`] that names the layer or the tensor at fault.
    pub fn weighted_shared_experts(
        &self,
        layer: u32,
    ) -> Result<Vec<ExpertTensors<'_>>, TensorError> {
        self.check_moe_layer(layer)?;
        let config = self.config();
        let shared = config.family.shared.as_ref();
        let Some((path, (gate_up, down))) = shared.and_then(|s| Some((s.path, s.stacked?))) else {
            return Ok(Vec::new());
        };
        let (hidden, width) = (config.model_hidden, config.moe_intermediate);
        let prefix = self.layer_prefix(layer);
        let [gate_up, down] = [gate_up, down].map(|name| format!("{prefix}{path}.{name}"));
        let interleaved_in = config.family.fused.interleaved_in;
        let num_experts = config.num_weighted_shared;
        let expert = |expert| {
            let part = |part, parts| Place {
                expert,
                num_experts,
                part,
                parts,
                interleaved: interleaved_in.is_some_and(|name| gate_up.contains(name)),
                transposed: false,
            };
            Ok(ExpertTensors {
                gate: Some(self.fused_linear(&gate_up, width, hidden, part(0, 2))?),
                up: self.fused_linear(&gate_up, width, hidden, part(1, 2))?,
                down: self.fused_linear(&down, hidden, width, part(0, 1))?,
                biases: None,
            })
        };
        (0..num_experts).map(expert).collect()
    }

    /// The weight whose sigmoid scales the shared expert's output (`[1, hidden]`), if the model has one.
    ///
    /// # Errors
    /// [`TensorError`] that names the layer or the tensor at fault.
    pub fn shared_expert_gate(&self, layer: u32) -> Result<Option<TensorView<'_>>, TensorError> {
        self.check_moe_layer(layer)?;
        let config = self.config();
        let gate = config.family.shared.as_ref().and_then(|shared| shared.gate);
        let Some(gate) = gate.filter(|_| config.shared_width > 0) else { return Ok(None) };
        self.tensor(&format!("{}{gate}", self.layer_prefix(layer)))?
            .expect_shape(&[1, config.model_hidden])?
            .expect_dtype(PLAIN_FLOATS)
            .map(Some)
    }

    /// Checks that every routed expert is present with the shapes, dtypes and scales of the configuration. Reads no
    /// weights.
    ///
    /// # Errors
    /// The first fault.
    pub fn check_experts(&self) -> Result<(), TensorError> {
        for layer in self.config().moe_layers() {
            for expert in 0..self.config().num_experts {
                self.expert(layer, expert)?;
            }
        }
        Ok(())
    }

    /// As [`check_experts`](Self::check_experts), with routers and shared experts.
    ///
    /// # Errors
    /// The first fault.
    pub fn check_moe(&self) -> Result<(), TensorError> {
        for layer in self.config().moe_layers() {
            self.router(layer)?;
            match self.config().num_weighted_shared {
                0 => drop(self.shared_expert(layer)?),
                _ => drop(self.weighted_shared_experts(layer)?),
            }
        }
        self.check_experts()
    }

    /// The layout of the experts.
    fn layout_of(&self, layer: u32) -> Result<&Layout, TensorError> {
        self.layout().ok_or_else(|| TensorError::NoExperts {
            layer,
            example: format!("model.layers.{layer}.mlp.experts.0.up_proj.weight"),
            location: self.dir().display().to_string(),
        })
    }

    /// The prefix of a layer's tensors. Without stored experts, as in a client's checkpoint, the usual one.
    fn layer_prefix(&self, layer: u32) -> String {
        match self.layout() {
            Some(layout) => layout.layer(layer),
            None => format!("{}layers.{layer}.", self.root()),
        }
    }

    fn single_expert(
        &self,
        prefix: &str,
        [gate, up, down]: [&str; 3],
        [width, hidden]: [usize; 2],
    ) -> Result<ExpertTensors<'_>, TensorError> {
        let is_gated = self.config().arithmetic.activation.is_gated();
        let linear = |name: &str, rows, cols| self.linear(&format!("{prefix}.{name}"), rows, cols);
        let bias = |name: &str, len| self.bias(&format!("{prefix}.{name}.bias"), len);
        let biases = match bias(up, width)? {
            None => {
                // One without the others is a layout that this reader does not know.
                for name in [gate, down] {
                    let name = format!("{prefix}.{name}.bias");
                    if self.contains(&name) {
                        return Err(self.lone_bias(&name, &format!("{prefix}.{up}.bias")));
                    }
                }
                None
            }
            Some(up_bias) => {
                let required = |name: &str, len| {
                    let found = bias(name, len)?;
                    let there = format!("{prefix}.{up}.bias");
                    found.ok_or_else(|| self.lone_bias(&there, &format!("{prefix}.{name}.bias")))
                };
                let gate = if is_gated { required(gate, width)? } else { Vec::new() };
                Some(ExpertBiases { gate, up: up_bias, down: required(down, hidden)? })
            }
        };
        let known = [gate, up, down].map(|name| format!("{prefix}.{name}.bias"));
        self.expect_no_others(&format!("{prefix}."), &known)?;
        Ok(ExpertTensors {
            gate: is_gated.then(|| linear(gate, width, hidden)).transpose()?,
            up: linear(up, width, hidden)?,
            down: linear(down, hidden, width)?,
            biases,
        })
    }

    fn fused_expert(
        &self,
        gate_up: &str,
        down: &str,
        expert: u32,
    ) -> Result<ExpertTensors<'_>, TensorError> {
        let config = self.config();
        let (hidden, width) = (config.hidden, config.moe_intermediate);
        let num_experts = config.num_experts as usize;
        let is_gated = config.arithmetic.activation.is_gated();
        let halves = if is_gated { 2 } else { 1 };
        let fused = config.family.fused;
        let interleaved = fused.interleaved_in.is_some_and(|name| gate_up.contains(name));
        let transposed = self.is_transposed(gate_up, down, halves);
        let place = |half| Place {
            expert: expert as usize,
            num_experts,
            part: half,
            parts: halves,
            interleaved,
            transposed,
        };
        let whole = Place { part: 0, parts: 1, ..place(0) };
        let biases = self.fused_biases(gate_up, down, expert as usize, &place)?;
        Ok(ExpertTensors {
            gate: is_gated
                .then(|| self.fused_linear(gate_up, width, hidden, place(0)))
                .transpose()?,
            up: self.fused_linear(gate_up, width, hidden, place(halves - 1))?,
            down: self.fused_linear(down, hidden, width, whole)?,
            biases,
        })
    }

    /// A shared expert whose gate and up are one matrix `[2 × width, hidden]` (Granite).
    fn fused_shared_expert(
        &self,
        prefix: &str,
        width: usize,
    ) -> Result<ExpertTensors<'_>, TensorError> {
        let hidden = self.config().model_hidden;
        let part = |part| {
            self.part_of_matrix(&format!("{prefix}.input_linear.weight"), width, hidden, part)
        };
        Ok(ExpertTensors {
            gate: Some(part(0)?),
            up: part(1)?,
            down: self.linear(&format!("{prefix}.output_linear"), hidden, width)?,
            biases: None,
        })
    }

    /// Orientation of a layer's fused tensors. Both shapes tell it together; where they fit both ways, the family does.
    fn is_transposed(&self, gate_up: &str, down: &str, halves: usize) -> bool {
        let config = self.config();
        let (experts, hidden) = (config.num_experts as usize, config.hidden);
        let width = config.moe_intermediate;
        let fits = |name: &str, straight: [usize; 2], transposed: bool| {
            let [rows, cols] = straight;
            let expected = if transposed { [experts, cols, rows] } else { [experts, rows, cols] };
            self.tensor(name).is_ok_and(|tensor| tensor.shape == expected)
        };
        let fit = |transposed| {
            fits(gate_up, [halves * width, hidden], transposed)
                && fits(down, [hidden, width], transposed)
        };
        match (fit(false), fit(true)) {
            (true, false) => false,
            (false, true) => true,
            _ => config.family.fused.transposed,
        }
    }

    /// The rules that decide how the stored bytes of a layer are read, as text for the fingerprint.
    pub(crate) fn reading_rules(&self, layer: u32) -> Result<String, TensorError> {
        let expert = self.expert(layer, 0)?;
        let formats: Vec<String> =
            expert.matrices().map(|matrix| matrix.format().to_string()).collect();
        let mut rules = format!("layer {layer}: {}", formats.join(" "));
        if let Stored::Fused { gate_up, down } = self.layout_of(layer)?.stored {
            let block = self.layout_of(layer)?.block_of(layer);
            let halves = if expert.gate.is_some() { 2 } else { 1 };
            let interleaved = self.config().family.fused.interleaved_in;
            let interleaved = interleaved.is_some_and(|name| gate_up.contains(name));
            let transposed =
                self.is_transposed(&format!("{block}{gate_up}"), &format!("{block}{down}"), halves);
            rules.push_str(&format!(" transposed={transposed} interleaved={interleaved}"));
        }
        Ok(rules)
    }

    fn fused_biases(
        &self,
        gate_up: &str,
        down: &str,
        expert: usize,
        place: &dyn Fn(usize) -> Place,
    ) -> Result<Option<ExpertBiases>, TensorError> {
        let config = self.config();
        let (hidden, width) = (config.hidden, config.moe_intermediate);
        let [gate_up, down] =
            [gate_up, down].map(|name| format!("{}_bias", name.trim_end_matches(".weight")));
        let known = [gate_up, down];
        for name in &known {
            let parent = name.rfind('.').map_or(0, |dot| dot + 1);
            self.expect_no_others(&name[..parent], &known)?;
        }
        let [gate_up, down] = known;
        match (self.contains(&gate_up), self.contains(&down)) {
            (false, false) => return Ok(None),
            (true, false) => return Err(self.lone_bias(&gate_up, &down)),
            (false, true) => return Err(self.lone_bias(&down, &gate_up)),
            (true, true) => {}
        }
        let parts = place(0).parts;
        let row = |name: &str, len: usize| {
            let tensor = self
                .tensor(name)?
                .expect_shape(&[config.num_experts as usize, len])?
                .expect_dtype(PLAIN_FLOATS)?;
            let bytes = tensor.data.len() / config.num_experts as usize;
            let data = &tensor.data[expert * bytes..][..bytes];
            TensorView { data, shape: &[len][..], ..tensor }.to_f32()
        };
        let both = row(&gate_up, parts * width)?;
        let half = |part: usize| -> Vec<f32> {
            match place(0).interleaved {
                true => both.iter().skip(part).step_by(parts).copied().collect(),
                false => both[part * width..][..width].to_vec(),
            }
        };
        Ok(Some(ExpertBiases {
            gate: if parts == 2 { half(0) } else { Vec::new() },
            up: half(parts - 1),
            down: row(&down, hidden)?,
        }))
    }

    fn bias(&self, name: &str, len: usize) -> Result<Option<Vec<f32>>, TensorError> {
        if !self.contains(name) {
            return Ok(None);
        }
        self.tensor(name)?.expect_shape(&[len])?.expect_dtype(PLAIN_FLOATS)?.to_f32().map(Some)
    }

    /// Refuses tensors below `prefix` that would change an expert's result and that nothing here reads.
    fn expect_no_others(&self, prefix: &str, known: &[String]) -> Result<(), TensorError> {
        let changes_result = |name: &&str| {
            let tail = &name[prefix.len()..];
            let is_bias = tail.ends_with("bias") && !tail.ends_with("correction_bias");
            is_bias || tail.contains("lora_") || tail.contains("act_fn")
        };
        let mut found = self.names_below(prefix).filter(changes_result);
        match found.find(|name| !known.iter().any(|known| known == name)) {
            None => Ok(()),
            Some(name) => Err(TensorError::Format {
                name: name.to_owned(),
                found: "changes the result".to_owned(),
                expected: "a checkpoint without it: it is not supported under this name".to_owned(),
            }),
        }
    }

    fn lone_bias(&self, there: &str, missing: &str) -> TensorError {
        TensorError::Format {
            name: there.to_owned(),
            found: "has no partner".to_owned(),
            expected: format!("a bias '{missing}', too"),
        }
    }

    fn check_moe_layer(&self, layer: u32) -> Result<(), TensorError> {
        if self.config().is_moe_layer(layer) {
            return Ok(());
        }
        Err(TensorError::NotMoeLayer { layer, moe_layers: self.config().moe_layers_text() })
    }
}
