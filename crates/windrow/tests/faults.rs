//! Every allocation that grows with the problem fails once: a typed error, and the next call works.

#[allow(dead_code)] // other tests call more of it
mod common;

use common::{Call, Causal, Conv, Packing, causal_conv1d, conv2d, gelu, update};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use windrow::{
    CausalConv1dAlgorithm, Conv2dAlgorithm, DType, Device, Error, Result, Tile, Verify, Workspace,
};

/// An allocator that refuses one of the counted requests.
struct Failing;

/// Requests of at least so many bytes count: what does not grow with a problem is smaller.
const LARGE: usize = 4 << 10;

/// The number of the next request to refuse; 0 for none.
static FAILS: AtomicUsize = AtomicUsize::new(0);

fn fails(bytes: usize) -> bool {
    let next = |left: usize| left.checked_sub(1);
    bytes >= LARGE && FAILS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) == Ok(1)
}

// SAFETY: the system's allocator, or no memory.
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if fails(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if fails(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if fails(size) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise: memory of the system's allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Failing = Failing;

/// Refuses the first, the second, ... of the large requests of `run` until none is left. Returns their number.
fn fail_each(name: &str, run: impl Fn() -> Result<u64>) -> usize {
    println!("{name}");
    let want = run().unwrap();
    for n in 1.. {
        FAILS.store(n, Ordering::Relaxed);
        let result = run();
        let is_over = FAILS.swap(0, Ordering::Relaxed) > 0;
        match result {
            Ok(got) => assert_eq!(got, want, "{name}: other results without request {n}"),
            Err(Error::OutOfMemory { device: Device::Cpu, bytes }) => {
                assert!(!is_over && bytes > 0, "{name}: request {n}");
            }
            Err(error) => panic!("{name}: {error:?} for request {n}"),
        }
        assert_eq!(run(), Ok(want), "{name}: after request {n} had failed");
        if is_over {
            return n - 1;
        }
    }
    unreachable!("a run makes finitely many requests")
}

/// Convolutions whose lists of taps are long: along one side of the filter, of residues modulo the stride, of all
/// taps, and with a part of the copied source for each tap.
fn many_taps() -> Vec<Call> {
    let conv = Conv::new([1, 1, 4, 3], [3, 1, 300, 2]);
    let square = Conv { x: [1, 1, 4, 4], w: [3, 1, 25, 25], ..conv };
    let convs = [
        conv,
        Conv { x: [1, 1, 3, 4], w: [3, 1, 2, 300], ..conv },
        square,
        Conv { dtype: DType::BF16, ..square },
        Conv { x: [1, 1, 24, 24], w: [3, 1, 24, 24], stride: 23, ..conv },
        Conv { x: [1, 1, 600, 3], w: [1, 1, 600, 1], stride: 300, ..conv },
    ];
    convs.into_iter().flat_map(Conv::by_all_algorithms).collect()
}

/// Problems with one large dimension each.
fn large() -> Vec<Call> {
    let depthwise = Causal { packing: Packing::SeqIdx, ..Causal::new([1, 3, 1200], 4) };
    let rows = Packing::Rows;
    let product = CausalConv1dAlgorithm::Im2colGemm;
    let mut calls = vec![gelu(DType::F32, &[3, 1500]), gelu(DType::F16, &[1500, 3])];
    calls.extend(
        [
            depthwise,
            Causal { x: [1, 1200, 3], ..depthwise },
            Causal { x: [1200, 2, 2], packing: rows, ..depthwise },
            Causal { packing: Packing::Boundaries(1100), ..depthwise },
            Causal { x: [1, 2, 30], width: 1200, packing: rows, ..depthwise },
            Causal { x: [1, 3, 1200], algorithm: product, ..depthwise },
            Causal { x: [1, 90, 20], algorithm: product, packing: rows, ..depthwise },
            Causal { x: [1, 9, 30], algorithm: product, dense: Some(200), ..depthwise },
        ]
        .map(causal_conv1d),
    );
    calls.push(update(DType::F32, [1200, 2, 1], 4));
    calls.push(update(DType::BF16, [2, 1200, 2], 3));
    let conv = Conv::new([1, 2, 34, 34], [3, 2, 3, 3]);
    let convs = [
        conv,
        Conv { dtype: DType::BF16, ..conv },
        Conv { x: [300, 1, 3, 3], w: [2, 1, 3, 3], ..conv },
        Conv { x: [1, 300, 3, 3], w: [2, 300, 3, 3], dtype: DType::F16, ..conv },
        Conv { x: [1, 2, 3, 3], w: [300, 2, 3, 3], ..conv },
        Conv { x: [1, 300, 3, 3], w: [300, 1, 3, 3], groups: 300, ..conv },
    ];
    calls.extend(convs.into_iter().flat_map(Conv::by_all_algorithms));
    calls
}

/// Problems whose oracles together make all lists that there are; they hardly depend on the algorithm.
fn verified() -> Vec<Call> {
    let causal = Causal { packing: Packing::SeqIdx, ..Causal::new([1, 1, 600], 2) };
    let mut calls = vec![gelu(DType::F32, &[1, 600]), update(DType::F32, [600, 1, 1], 2)];
    calls.extend(
        [
            causal,
            Causal { packing: Packing::Boundaries(600), ..causal },
            Causal { x: [600, 1, 2], packing: Packing::Rows, ..causal },
            Causal { x: [1, 1, 2], width: 600, packing: Packing::Rows, ..causal },
        ]
        .map(causal_conv1d),
    );
    let conv = Conv::new([1, 1, 24, 24], [1, 1, 3, 3]);
    let channels = Conv { x: [1, 520, 2, 2], w: [1, 520, 3, 3], ..conv };
    let filters = Conv { x: [1, 1, 2, 2], w: [520, 1, 3, 3], ..conv };
    for conv in [conv, channels, filters] {
        let tiled = Conv { algorithm: Conv2dAlgorithm::WinogradGemm(Tile::F4), ..conv };
        calls.extend([conv, tiled].map(conv2d));
    }
    calls
}

/// All cases are one test, because the request to refuse is a setting of the process.
#[test]
fn every_large_allocation_may_fail() {
    // The library keeps large blocks that are freed, up to a limit. This one leaves no room for others, so
    // that each run asks for all its memory.
    drop(Workspace::new(Device::Cpu, 512 << 20).unwrap());
    let mut requests = 0;
    for call in large().into_iter().chain(many_taps()) {
        let count = fail_each(&call.name, || call.results(Verify::Off));
        assert!(count > 0, "{} asks for no memory", call.name);
        requests += count;
    }
    for call in verified() {
        requests += fail_each(&call.name, || call.results(Verify::On));
    }
    println!("{requests} requests have failed");
    assert!(requests > 100, "{requests}");
}
