//! Merges frames of one layer into one batch, sorted by expert.

use protocol::{Entry, TokenRange};

use crate::compute::{ExpertGroup, LayerBatch};

/// Builds batches. Its buffers grow to the largest batch and are reused.
#[derive(Debug)]
pub(crate) struct BatchBuilder {
    hidden: usize,
    num_tokens: usize,
    x: Vec<f32>,
    out: Vec<f32>,
    /// (token, expert) pairs in the order of frames.
    entries: Vec<RoutedEntry>,
    /// Per expert: first the number of its entries, then the position of its next entry.
    cursor: Vec<u32>,
    groups: Vec<ExpertGroup>,
    entry_token: Vec<u32>,
    entry_weight: Vec<f32>,
}

#[derive(Debug, Clone, Copy)]
struct RoutedEntry {
    expert: u32,
    token: u32,
    weight: f32,
}

impl BatchBuilder {
    pub(crate) fn new(hidden: usize, num_experts: usize) -> Self {
        Self {
            hidden,
            num_tokens: 0,
            x: Vec::new(),
            out: Vec::new(),
            entries: Vec::new(),
            cursor: vec![0; num_experts],
            groups: Vec::with_capacity(num_experts),
            entry_token: Vec::new(),
            entry_weight: Vec::new(),
        }
    }

    pub(crate) fn clear(&mut self) {
        self.num_tokens = 0;
        self.entries.clear();
    }

    pub(crate) const fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    pub(crate) const fn num_entries(&self) -> usize {
        self.entries.len()
    }

    /// Memory for the rows `[num_rows, hidden]` of one more frame. [`commit`](Self::commit) adds them to the
    /// batch; without it the next call returns the same memory.
    pub(crate) fn rows_mut(&mut self, num_rows: usize) -> &mut [f32] {
        let begin = self.num_tokens * self.hidden;
        let end = begin + num_rows * self.hidden;
        if self.x.len() < end {
            self.x.resize(end, 0.0);
        }
        &mut self.x[begin..end]
    }

    /// Adds a frame after its rows are written, and returns its first row. The caller has checked the tables:
    /// every expert is below `num_experts`, every range is within `entries`.
    pub(crate) fn commit(&mut self, tokens: &[TokenRange], entries: &[Entry]) -> usize {
        let first_row = self.num_tokens;
        for (row, range) in tokens.iter().enumerate() {
            let begin = range.entry_begin as usize;
            let of_token = entries.get(begin..begin + range.entry_count as usize);
            let token = (first_row + row) as u32;
            for &Entry { expert, weight } in of_token.unwrap_or_default() {
                self.entries.push(RoutedEntry { expert, token, weight });
            }
        }
        self.num_tokens += tokens.len();
        first_row
    }

    /// Sorts the entries by expert. Entries of one expert keep their order.
    pub(crate) fn sort(&mut self) {
        self.cursor.fill(0);
        for entry in &self.entries {
            self.cursor[entry.expert as usize] += 1;
        }
        self.groups.clear();
        let mut begin = 0;
        for (expert, cursor) in self.cursor.iter_mut().enumerate() {
            let count = std::mem::replace(cursor, begin);
            if count > 0 {
                let end = begin + count;
                self.groups.push(ExpertGroup { expert: expert as u32, begin, end });
                begin = end;
            }
        }
        self.entry_token.resize(self.entries.len(), 0);
        self.entry_weight.resize(self.entries.len(), 0.0);
        for &RoutedEntry { expert, token, weight } in &self.entries {
            let at = &mut self.cursor[expert as usize];
            self.entry_token[*at as usize] = token;
            self.entry_weight[*at as usize] = weight;
            *at += 1;
        }
    }

    /// The experts of the sorted batch, each with its range of entries.
    pub(crate) fn groups(&self) -> &[ExpertGroup] {
        &self.groups
    }

    /// The sorted batch, and memory for its output `[num_tokens, hidden]`.
    pub(crate) fn layer_batch(&mut self) -> (LayerBatch<'_>, &mut [f32]) {
        let values = self.num_tokens * self.hidden;
        if self.out.len() < values {
            self.out.resize(values, 0.0);
        }
        let batch = LayerBatch {
            x: &self.x[..values],
            groups: &self.groups,
            entry_token: &self.entry_token,
            entry_weight: &self.entry_weight,
        };
        (batch, &mut self.out[..values])
    }

    /// Output rows `[num_rows, hidden]`, from `first_row` on.
    pub(crate) fn out_rows(&self, first_row: usize, num_rows: usize) -> &[f32] {
        &self.out[first_row * self.hidden..(first_row + num_rows) * self.hidden]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_merged_sorted_by_expert_and_reusing_the_builder_changes_nothing() {
        let mut builder = BatchBuilder::new(2, 5);
        for _ in 0..2 {
            builder.clear();
            let range = |entry_begin, entry_count| TokenRange { entry_begin, entry_count };
            let entry = |expert, weight| Entry { expert, weight };
            builder.rows_mut(2).copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
            let first = builder.commit(
                &[range(0, 2), range(2, 1)],
                &[entry(4, 0.5), entry(0, 0.25), entry(4, 1.0)],
            );
            // Rows that are not committed leave no trace.
            builder.rows_mut(7).fill(f32::NAN);
            builder.rows_mut(1).copy_from_slice(&[5.0, 6.0]);
            let second = builder.commit(&[range(0, 1)], &[entry(0, 2.0)]);
            assert_eq!((first, second, builder.num_tokens(), builder.num_entries()), (0, 2, 3, 4));
            builder.sort();
            let (batch, out) = builder.layer_batch();
            assert_eq!(batch.x, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
            let groups = [(0, 0, 2), (4, 2, 4)];
            let groups = groups.map(|(expert, begin, end)| ExpertGroup { expert, begin, end });
            assert_eq!(batch.groups, groups);
            assert_eq!(batch.entry_token, [0, 2, 0, 1]);
            assert_eq!(batch.entry_weight, [0.25, 2.0, 0.5, 1.0]);
            assert_eq!(out.len(), 6);
        }
    }
}
