//! Text for error words of kernels.

use std::fmt;

use crate::abi::{
    ErrorWord, REASON_ABORT, REASON_TIMEOUT, TAG_BAD_EXPERT, TAG_COMBINE_EMPTY, TAG_COMBINE_PATH,
    TAG_COMBINE_ROW, TAG_NO_REPLICA, TAG_NONE, TAG_NUM_TOKENS, TAG_PRODUCT, TAG_REFUSED,
};

/// Tag, peer, reason, observed and expected, in one line.
impl fmt::Display for ErrorWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tag, peer, observed, expected, .. } = *self;
        if tag == TAG_NONE {
            return f.write_str("no error");
        }
        let reason = match self.reason {
            REASON_TIMEOUT => "expired",
            REASON_ABORT => "was ended",
            _ => "found a wrong value",
        };
        let what = what(tag);
        write!(
            f,
            "{what} (tag {tag}, peer {peer}) {reason}: observed {observed:#x}, expected {expected:#x}"
        )
    }
}

const fn what(tag: u32) -> &'static str {
    match tag {
        1 => "the wait for a client's frame",
        TAG_COMBINE_ROW => "the wait for a server's answer to a token",
        TAG_COMBINE_EMPTY => "the wait for a server's answer to a frame without tokens",
        TAG_NO_REPLICA => "the choice of a replica",
        TAG_BAD_EXPERT => "the look at an expert's index",
        TAG_NUM_TOKENS => "the look at the number of tokens",
        7 => "the check of a frame",
        8 => "the wait for a peer's flag",
        TAG_REFUSED => "the look at a server's status",
        10 => "the check of the path to a peer",
        11 => "the wait for the path to a client",
        TAG_COMBINE_PATH => "the wait for the path to a server",
        TAG_PRODUCT => "the wait of an expert product's thread block for its own copies",
        32..=47 => "the work with a NIC's queue",
        48..=63 => "the work with a proxy's lane",
        _ => "a step that this build does not know",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tag_peer_reason_observed_and_expected_are_told() {
        let word = |tag, reason| ErrorWord {
            tag,
            peer: 3,
            reason,
            reserved: 0,
            observed: 0x11,
            expected: 0x12,
        };
        let text = word(TAG_COMBINE_ROW, REASON_TIMEOUT).to_string();
        let all = "(tag 2, peer 3) expired: observed 0x11, expected 0x12";
        assert!(
            text.starts_with("the wait for a server's answer") && text.ends_with(all),
            "{text}"
        );
        let text = word(50, REASON_ABORT).to_string();
        assert!(text.contains("proxy") && text.contains("was ended"), "{text}");
        assert_eq!(word(TAG_NONE, 0).to_string(), "no error");
    }
}
