//! Selections of experts, as a user writes them.

use std::str::FromStr;

use checkpoint::ModelConfig;
use control_api::{Assignment, LayerAssignment};

/// A selection of experts, for servers without a control plane.
///
/// It parses from text: `all`, expert ranges for every layer such as `0-3,8`, or ranges by layer such as
/// `0:0-3;1:4-7`.
///
/// # Examples
/// ```
/// use switchyard_expert_server::ExpertSelection;
///
/// let selection: ExpertSelection = "8,0-2".parse()?;
/// assert_eq!(selection, ExpertSelection::EveryLayer(vec![0, 1, 2, 8]));
/// # Ok::<(), switchyard_expert_server::SelectionError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpertSelection {
    /// Every expert of every layer.
    All,
    /// These experts of every layer, strictly ascending.
    EveryLayer(Vec<u32>),
    /// Experts by layer.
    ByLayer(Assignment),
}

/// Why a selection is invalid, by itself or for the model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum SelectionError {
    /// The text is not a selection.
    #[error(
        "'{found}' is not a selection of experts: expected `all`, `0-3,8` or `LAYER:0-3,8;LAYER:…`"
    )]
    Syntax { found: String },
    /// Nothing is selected.
    #[error("the selection holds no expert: a server needs at least one")]
    Empty,
    /// The layer has no routed experts.
    #[error(
        "layer {layer} of the selection has no routed experts; layers {first} to {last} of the model have some"
    )]
    Layer { layer: u32, first: u32, last: u32 },
    /// The model has no such expert.
    #[error(
        "expert {expert} of the selection does not exist: the model has {num_experts} per layer"
    )]
    Expert { expert: u32, num_experts: u32 },
}

impl ExpertSelection {
    /// The selected experts of a model.
    ///
    /// # Errors
    /// [`SelectionError`] when a layer or an expert does not exist, or nothing is selected.
    pub fn resolve(&self, model: &ModelConfig) -> Result<Assignment, SelectionError> {
        let moe_layers = model.moe_layers();
        let everywhere = |experts: Vec<u32>| {
            let layers = moe_layers.iter();
            let layers = layers.map(|&layer| LayerAssignment { layer, experts: experts.clone() });
            Assignment { layers: layers.collect() }
        };
        let assignment = match self {
            Self::All => everywhere((0..model.num_experts).collect()),
            Self::EveryLayer(experts) => everywhere(experts.clone()),
            Self::ByLayer(assignment) => assignment.clone(),
        };
        check_assignment(&assignment, model)?;
        Ok(assignment)
    }
}

/// Checks that a model has the layers and experts of an assignment.
pub(crate) fn check_assignment(
    assignment: &Assignment,
    model: &ModelConfig,
) -> Result<(), SelectionError> {
    if assignment.is_empty() {
        return Err(SelectionError::Empty);
    }
    let moe_layers = model.moe_layers();
    for LayerAssignment { layer, experts } in &assignment.layers {
        if !model.is_moe_layer(*layer) {
            let (first, last) = (moe_layers.first(), moe_layers.last());
            return Err(SelectionError::Layer {
                layer: *layer,
                first: first.copied().unwrap_or(0),
                last: last.copied().unwrap_or(0),
            });
        }
        if let Some(&expert) = experts.iter().find(|&&expert| expert >= model.num_experts) {
            return Err(SelectionError::Expert { expert, num_experts: model.num_experts });
        }
    }
    Ok(())
}

impl FromStr for ExpertSelection {
    type Err = SelectionError;

    fn from_str(text: &str) -> Result<Self, SelectionError> {
        let syntax = || SelectionError::Syntax { found: text.chars().take(80).collect() };
        let text = text.trim();
        if text.eq_ignore_ascii_case("all") {
            return Ok(Self::All);
        }
        if !text.contains(':') {
            return Ok(Self::EveryLayer(parse_ranges(text).ok_or_else(syntax)?));
        }
        let mut layers = Vec::new();
        for part in text.split(';').filter(|part| !part.trim().is_empty()) {
            let (layer, experts) = part.split_once(':').ok_or_else(syntax)?;
            let layer = layer.trim().parse().map_err(|_| syntax())?;
            layers.push(LayerAssignment {
                layer,
                experts: parse_ranges(experts).ok_or_else(syntax)?,
            });
        }
        layers.sort_by_key(|entry| entry.layer);
        if layers.windows(2).any(|pair| pair[0].layer == pair[1].layer) {
            return Err(syntax());
        }
        Ok(Self::ByLayer(Assignment { layers }))
    }
}

/// Parses `0-3,8` into a sorted list without repetitions.
fn parse_ranges(text: &str) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        // The largest models have a few hundred experts. The bound keeps a typo from taking memory.
        if last < first || last >= MAX_EXPERTS {
            return None;
        }
        numbers.extend(first..=last);
    }
    numbers.sort_unstable();
    numbers.dedup();
    Some(numbers)
}

const MAX_EXPERTS: u32 = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selections_are_read_in_every_spelling_and_nonsense_is_refused() {
        assert_eq!("all".parse(), Ok(ExpertSelection::All));
        assert_eq!("3,0-1".parse(), Ok(ExpertSelection::EveryLayer(vec![0, 1, 3])));
        let by_layer: ExpertSelection = "4:2;1:0-1".parse().unwrap();
        let ExpertSelection::ByLayer(assignment) = by_layer else { panic!("by layer") };
        assert_eq!(assignment.experts(1), [0, 1]);
        assert_eq!(assignment.experts(4), [2]);
        for bad in ["", "a", "3-1", "0-4294967295", "1:0;1:2", "1:", ":", "0-", "-3"] {
            let error = bad.parse::<ExpertSelection>();
            assert!(matches!(error, Err(SelectionError::Syntax { .. })), "{bad}: {error:?}");
        }
    }
}
