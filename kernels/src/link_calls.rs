//! The calls of a link one after the other: a put with an add and a signal behind it, a wait, and a get of the put
//! bytes. Tests of a path to a peer launch it; `include/switchyard/impls/link_calls.cuh` is the same in C++.

use std::mem::{offset_of, size_of};

use bytemuck::{Pod, Zeroable};

use crate::abi::{DevicePtr, Link, PATH_DIRECT};
use crate::check::{Check, CheckError};
use crate::entries::LINK_CALLS;
use crate::plan::{KernelParams, LaunchPlan};

/// `LinkCallsParams`
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct LinkCallsParams {
    /// To the peer.
    pub link: Link,
    /// Source of the put. Not read when `num_bytes` is 0, like `back`.
    pub source: DevicePtr,
    /// Target of the get of the same bytes: the mirror, over a path that posts.
    pub back: DevicePtr,
    /// Offset of the put and of the get in the peer's slot.
    pub offset: u64,
    /// Bytes of the put and of the get.
    pub num_bytes: u64,
    /// Offset of the word in the slot that is set to `value`.
    pub word_offset: u64,
    /// Offset of the word in the slot that `value` is added to.
    pub counter_offset: u64,
    /// The number.
    pub value: u64,
    /// Null, or a word of this side that is waited for before the get.
    pub echo: DevicePtr,
    /// [`ErrorWord`](crate::abi::ErrorWord).
    pub error: DevicePtr,
    /// Bound of the wait.
    pub timeout_ns: u64,
    /// u32 `[3]`: whether the quiet, the wait and the get ended well.
    pub good: DevicePtr,
}

impl Check for LinkCallsParams {
    fn check(&self) -> Result<(), CheckError> {
        if self.timeout_ns == 0 {
            return Err(CheckError::Bound);
        }
        let needed = [self.link.window, self.error, self.good];
        let moved = [self.source, self.back];
        let has_null = |pointers: &[DevicePtr]| pointers.iter().any(|pointer| pointer.is_null());
        if has_null(&needed)
            || (self.num_bytes != 0 && has_null(&moved))
            || (self.link.path != PATH_DIRECT && self.link.context == 0)
        {
            return Err(CheckError::Null);
        }
        Ok(())
    }
}

impl KernelParams for LinkCallsParams {
    const NAME: &'static str = "link_calls";

    fn plan(&self) -> LaunchPlan {
        LaunchPlan {
            num_blocks: 1,
            num_threads: 32,
            is_tuned: false,
            is_few: false,
            entry: LINK_CALLS,
            shared_bytes: 0,
            overlaps: false,
        }
    }

    fn pointers(&self) -> Vec<(&'static str, DevicePtr)> {
        vec![
            ("link.window", self.link.window),
            ("source", self.source),
            ("back", self.back),
            ("echo", self.echo),
            ("error", self.error),
            ("good", self.good),
        ]
    }
}

const _: () = assert!(size_of::<LinkCallsParams>() == 112);
const _: () = assert!(offset_of!(LinkCallsParams, good) == 104);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::PATH_PROXY;

    #[test]
    fn what_is_needed_is_asked_for() {
        let link = Link { window: DevicePtr(64), context: 64, path: PATH_PROXY, reserved: 0 };
        let good = LinkCallsParams {
            link,
            source: DevicePtr(64),
            back: DevicePtr(64),
            num_bytes: 8,
            error: DevicePtr(64),
            timeout_ns: 1,
            good: DevicePtr(64),
            ..Zeroable::zeroed()
        };
        assert_eq!(good.check(), Ok(()));
        let null = DevicePtr::NULL;
        let without = [
            LinkCallsParams { link: Link { window: null, ..link }, ..good },
            LinkCallsParams { link: Link { context: 0, ..link }, ..good },
            LinkCallsParams { source: null, ..good },
            LinkCallsParams { back: null, ..good },
            LinkCallsParams { error: null, ..good },
            LinkCallsParams { good: null, ..good },
        ];
        for params in without {
            assert_eq!(params.check(), Err(CheckError::Null), "{params:?}");
        }
        let unbounded = LinkCallsParams { timeout_ns: 0, ..good };
        assert_eq!(unbounded.check(), Err(CheckError::Bound));
        // Nothing is moved from nowhere to nowhere, and direct stores need no context.
        let direct = Link { context: 0, path: PATH_DIRECT, ..link };
        let idle = LinkCallsParams { link: direct, source: null, back: null, num_bytes: 0, ..good };
        assert_eq!(idle.check(), Ok(()));
    }
}
