// What each program of this folder tells of its tool loops: a line of JSON for each.

const cities = [];

export const schema = {
  type: 'object', properties: { city: { type: 'string' } }, required: ['city'], additionalProperties: false,
};

export function asked({ city }) {
  cities.push(city);
  return '21 degrees';
}

export function report(way, answer) {
  console.log(JSON.stringify({ way, cities, answer }));
  cities.length = 0;
}
