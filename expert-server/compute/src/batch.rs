//! The input of one call: routed tokens of one layer, grouped by expert.

use super::weights::LayerExperts;

/// The entries of one expert: positions `begin..end` in the entry arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroup {
    /// Expert id within the layer, as the model numbers it.
    pub expert: u32,
    /// First entry.
    pub begin: u32,
    /// One past the last entry; equal to `begin` for an empty group.
    pub end: u32,
}

/// A merged batch of one MoE layer.
///
/// An *entry* is one (token, expert) pair. Entries are sorted by expert. The entries of a token are summed in
/// their order, so the result depends on the batch alone, not on the number of threads. Entries outside all
/// groups are ignored.
#[derive(Clone, Copy, Debug)]
pub struct LayerBatch<'a> {
    /// Hidden states `[num_tokens, hidden]`, row-major.
    pub x: &'a [f32],
    /// Groups in strictly increasing order of expert, disjoint and in order of entries.
    pub groups: &'a [ExpertGroup],
    /// Row of `x` (and of the output) per entry.
    pub entry_token: &'a [u32],
    /// Routing weight per entry.
    pub entry_weight: &'a [f32],
}

/// Why a batch was not computed. The contents of `out` are unspecified after an error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum ComputeError {
    /// `x` is not a whole number of rows.
    #[error("x holds {found} values, which is not a multiple of the hidden size {hidden}")]
    InputSize { found: usize, hidden: usize },
    /// `out` differs in size from `x`.
    #[error("out holds {found} values, expected {expected} (as many as x)")]
    OutputSize { found: usize, expected: usize },
    /// The entry arrays differ in length.
    #[error("{tokens} entry tokens but {weights} entry weights; expected one weight per entry")]
    EntrySize { tokens: usize, weights: usize },
    /// Groups are not in strictly increasing order of expert.
    #[error(
        "group {group} is for expert {expert}, after a group for expert {previous}; expected increasing experts"
    )]
    GroupOrder { group: usize, expert: u32, previous: u32 },
    /// A group's range is inverted, overlaps the one before, or leaves the entry arrays.
    #[error(
        "group {group} covers entries {begin}..{end}, expected a range within {low}..{num_entries}"
    )]
    GroupRange {
        group: usize,
        begin: u32,
        end: u32,
        /// End of the group before it.
        low: u32,
        num_entries: usize,
    },
    /// An entry names a token that the batch does not have.
    #[error("entry {entry} names token {token}, but the batch has {num_tokens} tokens")]
    TokenIndex { entry: usize, token: u32, num_tokens: usize },
    /// The batch needs an expert that is not loaded.
    #[error("expert {expert} is not loaded on this server")]
    NotLoaded { expert: u32 },
    /// A compute thread panicked while it worked on this batch. The pool stays usable.
    #[error(
        "compute thread {thread} panicked while it worked on this batch; see its message on stderr"
    )]
    WorkerPanicked {
        /// Index of the thread, 0 being the caller.
        thread: usize,
    },
}

impl LayerBatch<'_> {
    /// Checks all fields against `experts` and the length of the output. Returns the number of tokens.
    ///
    /// # Errors
    /// The first inconsistency found.
    pub fn validate(&self, experts: &LayerExperts, out_len: usize) -> Result<usize, ComputeError> {
        let hidden = experts.hidden();
        if !self.x.len().is_multiple_of(hidden) {
            return Err(ComputeError::InputSize { found: self.x.len(), hidden });
        }
        if out_len != self.x.len() {
            return Err(ComputeError::OutputSize { found: out_len, expected: self.x.len() });
        }
        let num_tokens = self.x.len() / hidden;
        let num_entries = self.entry_token.len();
        if self.entry_weight.len() != num_entries {
            let weights = self.entry_weight.len();
            return Err(ComputeError::EntrySize { tokens: num_entries, weights });
        }
        let mut low = 0;
        let mut previous = None;
        for (group, &ExpertGroup { expert, begin, end }) in self.groups.iter().enumerate() {
            if let Some(previous) = previous.filter(|&p| p >= expert) {
                return Err(ComputeError::GroupOrder { group, expert, previous });
            }
            if begin < low || end < begin || end as usize > num_entries {
                return Err(ComputeError::GroupRange { group, begin, end, low, num_entries });
            }
            if begin < end && experts.get(expert).is_none() {
                return Err(ComputeError::NotLoaded { expert });
            }
            previous = Some(expert);
            low = end;
        }
        match self.entry_token.iter().position(|&token| token as usize >= num_tokens) {
            Some(entry) => {
                Err(ComputeError::TokenIndex { entry, token: self.entry_token[entry], num_tokens })
            }
            None => Ok(num_tokens),
        }
    }
}
