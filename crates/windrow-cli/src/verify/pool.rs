//! Work spread over threads.

use std::sync::Mutex;

/// Calls `work` for each item of `items`, on `threads` threads, which take the items in order; gives what it
/// returned in the order of the items.
pub(super) fn over<T: Send, R: Send>(
    threads: usize,
    items: impl Iterator<Item = T> + Send,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let items = Mutex::new(items.enumerate());
    let done = Mutex::new(Vec::new());
    // A panic ends the program when the scope ends: then a poisoned lock does not matter.
    let worker = || {
        loop {
            let next = items.lock().unwrap_or_else(|e| e.into_inner()).next();
            let Some((i, item)) = next else { break };
            let result = work(item);
            done.lock().unwrap_or_else(|e| e.into_inner()).push((i, result));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(worker);
        }
        worker();
    });
    let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn results_come_in_order() {
        let squares = super::over(5, 0..1000u64, |i| i * i);
        assert_eq!(squares, (0..1000).map(|i| i * i).collect::<Vec<_>>());
    }
}
